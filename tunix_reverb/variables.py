"""Variables as bytes: how params and their version cross a process boundary.

Layout: magic, header length (uint64, little-endian), a JSON header, padding,
then the leaves' raw bytes in C order, each aligned to 64. The header holds the
tree's structure and each leaf's dtype by name and shape, so that nothing is
unpickled and bfloat16 comes back as bfloat16. Decoded leaves are read-only
views of the buffer.

Variables too large for a table are written to a file, and a small pointer
takes their place.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
import re
from typing import Any
import zlib

import ml_dtypes
import numpy as np

from tunix_reverb import types

_MAGIC = b'TNXVARS1'
_ALIGNMENT = 64
_FILE_PATTERN = re.compile(r'variables-[0-9a-f]{16}-\d{12}\.bin')

# Readers may still be in the file before the newest.
_FILES_TO_KEEP = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePointer:
  """Where a file of encoded variables lies.

  Attributes:
    path: of the file, on storage that every role sees.
    num_bytes: its size.
    crc32: of its content.
  """

  path: str
  num_bytes: int
  crc32: int


def encode(variables: types.Variables) -> np.ndarray:
  """Serialises `variables`: uint8 [n].

  Raises:
    TypeError: the pytree holds something other than dicts with string keys,
      lists, tuples, None and numeric arrays.
  """
  leaves: list[np.ndarray] = []
  structure = _structure(variables.params, leaves, 'params')
  offset = 0
  entries = []
  for leaf in leaves:
    entries.append([leaf.dtype.name, list(leaf.shape), offset])
    offset += _padded(leaf.nbytes)
  header = json.dumps(
    {
      'policy_version': variables.policy_version,
      'structure': structure,
      'leaves': entries,
    }
  ).encode()
  start = _padded(len(_MAGIC) + 8 + len(header))
  buffer = np.zeros(start + offset, np.uint8)
  prefix = _MAGIC + len(header).to_bytes(8, 'little') + header
  buffer[: len(prefix)] = np.frombuffer(prefix, np.uint8)
  for leaf, (_, _, at) in zip(leaves, entries):
    if leaf.nbytes:
      raw = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
      buffer[start + at : start + at + leaf.nbytes] = raw
  return buffer


def decode(buffer: np.ndarray) -> types.Variables:
  """The inverse of `encode`; leaves are read-only views of `buffer`.

  Args:
    buffer: uint8 [n], and possibly padding after it.

  Raises:
    ValueError: these are not encoded variables.
  """
  buffer = buffer.view()
  buffer.flags.writeable = False
  try:
    if buffer[: len(_MAGIC)].tobytes() != _MAGIC:
      raise ValueError('they begin differently')
    length_at = len(_MAGIC)
    length = int.from_bytes(buffer[length_at : length_at + 8], 'little')
    header_at = length_at + 8
    header = json.loads(buffer[header_at : header_at + length].tobytes())
    start = _padded(header_at + length)
    leaves = []
    for name, shape, at in header['leaves']:
      dtype = _dtype(name)
      end = start + at + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
      if end > buffer.size:
        raise ValueError(f'they end early: {buffer.size} of {end} bytes')
      leaves.append(buffer[start + at : end].view(dtype).reshape(shape))
    params = _restore(header['structure'], leaves)
    return types.Variables(
      policy_version=int(header['policy_version']), params=params
    )
  except (ValueError, KeyError, TypeError, IndexError) as e:
    raise ValueError(f'the bytes must be encoded variables: {e}') from e


def write_file(
  buffer: np.ndarray, directory: pathlib.Path, publisher: int, version: int
) -> FilePointer:
  """Writes encoded variables into `directory` and removes older ones.

  The file appears under its name only when it is complete. The newest two of
  each publisher stay; other files in the directory are left alone.

  Args:
    buffer: what `encode` returned.
    directory: created if absent; every role must see it.
    publisher: uint64 that tells this writer's files from others'.
    version: the variables' `policy_version`.

  Raises:
    OSError: it could not be written.
  """
  directory = pathlib.Path(directory).absolute()
  directory.mkdir(parents=True, exist_ok=True)
  prefix = f'variables-{publisher:016x}-'
  path = directory / f'{prefix}{version:012d}.bin'
  incomplete = directory / f'.{path.name}.incomplete'
  try:
    with open(incomplete, 'wb') as file:
      file.write(buffer)
      file.flush()
      os.fsync(file.fileno())
    incomplete.rename(path)
  except OSError:
    incomplete.unlink(missing_ok=True)
    raise
  ours = sorted(
    p for p in directory.glob(prefix + '*') if _FILE_PATTERN.fullmatch(p.name)
  )
  for old in ours[:-_FILES_TO_KEEP]:
    old.unlink(missing_ok=True)
  return FilePointer(
    path=str(path), num_bytes=buffer.size, crc32=zlib.crc32(buffer)
  )


def read_file(pointer: FilePointer) -> np.ndarray:
  """Reads what `write_file` wrote: uint8 [n].

  Raises:
    OSError: the file is not there, or no longer.
    ValueError: it is damaged.
  """
  buffer = np.fromfile(pointer.path, np.uint8)
  if buffer.size != pointer.num_bytes or zlib.crc32(buffer) != pointer.crc32:
    raise ValueError(f'{pointer.path} must hold what its pointer says')
  return buffer


def encode_pointer(pointer: FilePointer) -> np.ndarray:
  """A pointer as bytes: uint8 [n]."""
  text = json.dumps(dataclasses.asdict(pointer))
  return np.frombuffer(text.encode(), np.uint8)


def decode_pointer(buffer: np.ndarray) -> FilePointer | None:
  """The inverse of `encode_pointer`; None for encoded variables."""
  if buffer[: len(_MAGIC)].tobytes() == _MAGIC:
    return None
  return FilePointer(**json.loads(buffer.tobytes()))


def _structure(node: Any, leaves: list[np.ndarray], where: str) -> Any:
  """The JSON form of a pytree; appends its leaves to `leaves`."""
  if node is None:
    return None
  if isinstance(node, Mapping):
    if not all(isinstance(key, str) for key in node):
      raise TypeError(f'{where} must have string keys: {list(node)}')
    return {
      'dict': {
        key: _structure(value, leaves, f'{where}/{key}')
        for key, value in node.items()
      }
    }
  if isinstance(node, (list, tuple)):
    if hasattr(node, '_fields'):
      raise TypeError(
        f'{where} is a {type(node).__name__}; params must be dicts, lists, '
        'tuples and arrays, so that every process can rebuild them'
      )
    kind = 'list' if isinstance(node, list) else 'tuple'
    return {
      kind: [
        _structure(value, leaves, f'{where}/{i}')
        for i, value in enumerate(node)
      ]
    }
  leaf = np.asarray(node)
  if _dtype_or_none(leaf.dtype.name) != leaf.dtype:
    raise TypeError(f'{where} has dtype {leaf.dtype}, which cannot be sent')
  leaves.append(leaf)
  return len(leaves) - 1


def _restore(structure: Any, leaves: list[np.ndarray]) -> Any:
  if structure is None:
    return None
  if isinstance(structure, int):
    return leaves[structure]
  ((kind, content),) = structure.items()
  if kind == 'dict':
    return {key: _restore(value, leaves) for key, value in content.items()}
  values = [_restore(value, leaves) for value in content]
  return values if kind == 'list' else tuple(values)


def _dtype_or_none(name: str) -> np.dtype | None:
  extension = getattr(ml_dtypes, name, None)
  if extension is not None:
    return np.dtype(extension)
  try:
    dtype = np.dtype(name)
  except TypeError:
    return None
  return dtype if dtype.kind in 'biufc' else None


def _dtype(name: str) -> np.dtype:
  dtype = _dtype_or_none(name)
  if dtype is None:
    raise ValueError(f'unknown dtype {name!r}')
  return dtype


def _padded(num_bytes: int) -> int:
  return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
