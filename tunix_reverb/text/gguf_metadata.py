"""The description inside a GGUF file, and the reader that gives it."""

from __future__ import annotations

import pathlib
from typing import Any

from tunix_reverb import errors


def open_reader(path: pathlib.Path) -> Any:
  """A `gguf.GGUFReader` of the file, which it maps into memory.

  Raises:
    errors.UserError: it is not a GGUF file.
    errors.MissingExtraError: the package gguf is absent.
  """
  try:
    import gguf
  except ImportError as e:
    raise errors.MissingExtraError(
      f'model ({path}) needs the package gguf: install the extra agents'
    ) from e
  try:
    return gguf.GGUFReader(path)
  # It raises almost any type for a file that is none.
  except Exception as e:  # pylint: disable=broad-exception-caught
    raise errors.UserError(
      f'model ({path}) is not a readable GGUF file: {e}'
    ) from e


def field(reader: Any, name: str, default: Any = None) -> Any:
  """The value of a metadata field."""
  found = reader.get_field(name)
  return default if found is None else found.contents()
