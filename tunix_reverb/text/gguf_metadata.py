"""The description inside a GGUF file, and the reader that gives it."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from tunix_reverb import errors


def open_reader(path: pathlib.Path) -> Any:
  """A `gguf.GGUFReader` of the file, which it maps into memory.

  Reading a large vocabulary takes seconds: the last reader is kept.

  Raises:
    errors.UserError: it is not a GGUF file.
    errors.MissingExtraError: the package gguf is absent.
  """
  try:
    status = path.stat()
  except OSError as e:
    raise errors.UserError(f'model ({path}) cannot be read: {e}') from e
  return _open(path.absolute(), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _open(path: pathlib.Path, *_: int) -> Any:
  """The rest tells one file of that name from a later one."""
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
