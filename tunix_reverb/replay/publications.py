"""What one item of the table of variables holds, and its checksum.

An item holds the encoded variables cut into equal chunks (the last one
padded), one timestep each, with their size, checksum, publisher and time beside
every chunk. What is too large for the table's memory goes to a file, and the
item holds a pointer to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple
import zlib

import numpy as np

from tunix_reverb import specs

# What one timestep of an item holds, in this order, which is that of the names.
COLUMNS: Mapping[str, specs.ColumnSpec] = {
  'checksum': specs.ColumnSpec((), np.dtype(np.uint32)),  # CRC-32.
  'data': specs.ColumnSpec((None,), np.dtype(np.uint8)),
  'num_bytes': specs.ColumnSpec((), np.dtype(np.int64)),  # Without padding.
  'published_at_s': specs.ColumnSpec((), np.dtype(np.float64)),
  'publisher': specs.ColumnSpec((), np.dtype(np.uint64)),
}


class Publication(NamedTuple):
  """What one item says.

  Attributes:
    payload: uint8 [n], encoded variables or a pointer to a file of them.
    publisher: uint64, drawn anew by each sink.
    published_at_s: wall-clock time of the publish.
  """

  payload: np.ndarray
  publisher: int
  published_at_s: float


def pack(publication: Publication, chunk_bytes: int) -> list[list[np.ndarray]]:
  """The timesteps of an item: arrays in the order of `COLUMNS`.

  Args:
    publication: its payload must not be empty.
    chunk_bytes: most bytes of the payload per timestep.
  """
  payload, publisher, published_at_s = publication
  chunk_bytes = min(chunk_bytes, payload.size)
  checksum = np.array(zlib.crc32(payload), np.uint32)
  num_bytes = np.array(payload.size, np.int64)
  timesteps = []
  for start in range(0, payload.size, chunk_bytes):
    chunk = payload[start : start + chunk_bytes]
    if chunk.size < chunk_bytes:
      chunk = np.pad(chunk, (0, chunk_bytes - chunk.size))
    timesteps.append(
      [
        checksum,
        chunk,
        num_bytes,
        np.array(published_at_s, np.float64),
        np.array(publisher, np.uint64),
      ]
    )
  return timesteps


def unpack(columns: Sequence[np.ndarray]) -> Publication:
  """The inverse of `pack`.

  Args:
    columns: in the order of `COLUMNS`, [num_timesteps, ...] each.

  Raises:
    ValueError: it is not a publication, or not as it was published.
  """
  if len(columns) != len(COLUMNS) or not all(
    column.dtype == spec.dtype
    and column.ndim == len(spec.shape) + 1
    and len(column)
    for column, spec in zip(columns, COLUMNS.values())
  ):
    raise ValueError('published variables must have the columns of their table')
  checksum, data, num_bytes, published_at_s, publisher = columns
  payload = data.reshape(-1)[: int(num_bytes[0])]
  if payload.size != num_bytes[0] or zlib.crc32(payload) != checksum[0]:
    raise ValueError(
      f'published variables of {int(num_bytes[0])} bytes must have the '
      'checksum that was published with them'
    )
  return Publication(payload, int(publisher[0]), float(published_at_s[0]))
