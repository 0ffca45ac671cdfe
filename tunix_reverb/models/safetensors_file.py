"""Safetensors files: a JSON header, then raw little-endian arrays.

Reads by mapping files into memory, a part of a tensor at a time, and writes one
tensor after the other, so that neither ever holds a second copy of a model. The
`safetensors` package can do the first for float32 only (NumPy has no bfloat16)
and not the second. Format: the package's README, version 0.8.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import json
import math
import os
import pathlib
from typing import Any
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tunix_reverb import errors
from tunix_reverb.models import source as source_lib

INDEX_NAME = 'model.safetensors.index.json'
SINGLE_NAME = 'model.safetensors'
DTYPES: Mapping[str, np.dtype] = {
  'F64': np.dtype(np.float64),
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8


class Entry(NamedTuple):
  """One tensor to write.

  Attributes:
    name: of the tensor.
    shape: of the tensor.
    parts: makes the arrays of its values in order, one at a time; their values
      follow each other.
  """

  name: str
  shape: tuple[int, ...]
  parts: Callable[[], Iterable[np.ndarray]]


class SafetensorsSource(source_lib.TensorSource):
  """The tensors of one or several files."""

  def __init__(self, paths: Iterable[pathlib.Path]):
    """Reads the headers.

    Raises:
      errors.UserError: a file is not of this format, or is cut off.
    """
    self._tensors: dict[str, np.ndarray] = {}
    for path in paths:
      self._tensors.update(_map_file(path))

  def names(self) -> Iterable[str]:
    return self._tensors.keys()

  def shape(self, name: str) -> tuple[int, ...]:
    return self._tensors[name].shape

  def read(self, name: str, index: source_lib.Index) -> np.ndarray:
    return self._tensors[name][index]


def find(directory: pathlib.Path) -> list[pathlib.Path]:
  """The safetensors files of a checkpoint, in order.

  Raises:
    errors.UserError: there are none, or the index names absent ones.
  """
  index = directory / INDEX_NAME
  if not index.is_file():
    if not (directory / SINGLE_NAME).is_file():
      raise errors.UserError(
        f'model directory ({directory}) must hold {SINGLE_NAME} or '
        f'{INDEX_NAME}; convert checkpoints of other formats first'
      )
    return [directory / SINGLE_NAME]
  try:
    names = set(json.loads(index.read_text())['weight_map'].values())
  except (ValueError, KeyError, AttributeError, TypeError) as e:
    raise errors.UserError(f'{index} is not an index of safetensors') from e
  paths = [directory / name for name in sorted(names)]
  for path in paths:
    if path.parent != directory or not path.is_file():
      raise errors.UserError(f'{index} names {path.name}, which is not there')
  return paths


def write(path: pathlib.Path, entries: Iterable[Entry], *, dtype: str) -> int:
  """Writes a file; it appears when it is complete.

  Args:
    path: of the file.
    entries: the tensors, in order.
    dtype: of all, a key of DTYPES.

  Returns:
    Bytes of the tensors.
  """
  entries = list(entries)
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  offset = 0
  for entry in entries:
    end = offset + math.prod(entry.shape) * DTYPES[dtype].itemsize
    header[entry.name] = {
      'dtype': dtype,
      'shape': list(entry.shape),
      'data_offsets': [offset, end],
    }
    offset = end
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % _LENGTH_BYTES)
  temporary = path.with_name(path.name + '.tmp')
  with open(temporary, 'wb') as file:
    file.write(len(text).to_bytes(_LENGTH_BYTES, 'little') + text)
    for entry in entries:
      for part in entry.parts():
        # NumPy cannot write bfloat16 by itself.
        part = np.ascontiguousarray(part.astype(DTYPES[dtype], copy=False))
        file.write(part.view(np.uint8).data)
    assert file.tell() == _LENGTH_BYTES + len(text) + offset
  os.replace(temporary, path)
  return offset


def _map_file(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Views of the tensors in a file, by name."""
  try:
    data = np.memmap(path, np.uint8, mode='r')
  except (OSError, ValueError) as e:
    raise errors.UserError(f'{path} cannot be read: {e}') from e
  length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), 'little')
  start = _LENGTH_BYTES + length
  if length > min(_MAX_HEADER_BYTES, data.size - _LENGTH_BYTES):
    raise errors.UserError(f'{path} is not a safetensors file, or is cut off')
  try:
    header = json.loads(data[_LENGTH_BYTES:start].tobytes())
    return {
      name: _view(path, name, data[start:], entry)
      for name, entry in header.items()
      if name != '__metadata__'
    }
  except (ValueError, KeyError, TypeError, AttributeError) as e:
    if isinstance(e, errors.UserError):
      raise
    raise errors.UserError(
      f'{path} has no header of a safetensors file: {e}'
    ) from e


def _view(
  path: pathlib.Path, name: str, data: np.ndarray, entry: Mapping[str, Any]
) -> np.ndarray:
  dtype, shape = entry['dtype'], tuple(int(n) for n in entry['shape'])
  begin, end = entry['data_offsets']
  if dtype not in DTYPES:
    raise errors.UserError(
      f'{path}: dtype of {name} ({dtype}) must be one of {", ".join(DTYPES)}; '
      'save the model without quantisation'
    )
  size = math.prod(shape) * DTYPES[dtype].itemsize
  if not 0 <= begin <= end <= data.size or end - begin != size:
    raise errors.UserError(
      f'{path}: {name} takes {size} bytes, and {begin} to {end} of '
      f'{data.size} are given: the file is damaged or cut off'
    )
  return data[begin:end].view(DTYPES[dtype]).reshape(shape)
