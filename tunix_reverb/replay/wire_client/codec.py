"""Dtypes, varints, strings and Snappy blocks as Reverb's protocol has them.

A tensor's dtype is TensorFlow's number for it. bfloat16 and the float8 types
are written as raw unsigned integers of their size, which is what the official
client can read: the table's signature says uint16 or uint8, and a reader that
was told the dtype it expects views the integers as that (`view_as`). Tensors
that were written with the numbers of bfloat16 or float8 are read as such.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools

import ml_dtypes
import numpy as np

# Their content is not compressed; see `encode_strings`.
STRING = 7

# TensorFlow's numbers of NumPy's dtypes.
NUMBERS: dict[np.dtype, int] = {
  np.dtype(name): number
  for name, number in (
    ('float32', 1),
    ('float64', 2),
    ('int32', 3),
    ('uint8', 4),
    ('int16', 5),
    ('int8', 6),
    ('complex64', 8),
    ('int64', 9),
    ('bool', 10),
    ('uint16', 17),
    ('complex128', 18),
    ('float16', 19),
    ('uint32', 22),
    ('uint64', 23),
  )
}

# Numbers of those that NumPy has from ml_dtypes.
_EXTENDED: dict[np.dtype, int] = {
  np.dtype(ml_dtypes.bfloat16): 14,
  np.dtype(ml_dtypes.float8_e5m2): 24,
  np.dtype(ml_dtypes.float8_e4m3fn): 25,
}

# The dtype of an array that is read, by number; strings become objects.
DTYPES: dict[int, np.dtype] = {
  **{number: dtype for dtype, number in NUMBERS.items()},
  **{number: dtype for dtype, number in _EXTENDED.items()},
  STRING: np.dtype(object),
}

_MAX_VARINT_BYTES = 10


def stored_dtype(dtype: np.dtype) -> np.dtype:
  """The dtype in which arrays of `dtype` are stored; itself for most.

  Raises:
    TypeError: Reverb stores no such dtype.
  """
  if dtype in NUMBERS:
    return dtype
  if dtype.kind in 'OSU':
    return np.dtype(object)
  if dtype.kind in 'biufc' and dtype.newbyteorder('=') in NUMBERS:
    return dtype.newbyteorder('=')
  if dtype.kind in 'Vf' and dtype.fields is None and dtype.subdtype is None:
    # bfloat16, every float8, and what else ml_dtypes has in whole bytes.
    if dtype.type.__module__.startswith('ml_dtypes') and dtype.itemsize <= 2:
      return np.dtype(np.uint8 if dtype.itemsize == 1 else np.uint16)
  raise TypeError(
    f'dtype ({dtype}) must be a bool, an integer, a float, bfloat16, a float8, '
    'complex, or bytes or str'
  )


def view_as(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """`array` as `dtype` if it holds that dtype's raw integers, else itself."""
  if array.dtype != dtype and _is_raw(array.dtype, dtype):
    return array.view(dtype)
  return array


def _is_raw(stored: np.dtype, dtype: np.dtype) -> bool:
  return (
    stored.kind == 'u'
    and dtype.itemsize == stored.itemsize
    and dtype.type.__module__.startswith('ml_dtypes')
  )


def varint(value: int) -> bytes:
  """`value` >= 0 in protobuf's variable-length encoding."""
  if value < 1 << 28:
    return _varint(value)
  # Of the keys that a writer counts up, only the low bits change.
  return bytes(
    (
      value & 0x7F | 0x80,
      value >> 7 & 0x7F | 0x80,
      value >> 14 & 0x7F | 0x80,
      value >> 21 & 0x7F | 0x80,
    )
  ) + _varint(value >> 28)


@functools.lru_cache(4096)
def _varint(value: int) -> bytes:
  encoded = bytearray()
  while value >= 0x80:
    encoded.append(value & 0x7F | 0x80)
    value >>= 7
  encoded.append(value)
  return bytes(encoded)


def read_varint(data: bytes | memoryview, offset: int) -> tuple[int, int]:
  """The varint at `offset`, and the offset behind it.

  Raises:
    ValueError: there is none.
  """
  value = 0
  for i, byte in enumerate(data[offset : offset + _MAX_VARINT_BYTES]):
    value |= (byte & 0x7F) << 7 * i
    if byte < 0x80:
      return value, offset + i + 1
  raise ValueError(f'a varint at byte {offset} has no end')


def encode_strings(strings: Sequence[bytes | str]) -> bytes:
  """Their lengths in bytes as varints, then the bytes of all; str as UTF-8."""
  encoded = [s.encode() if isinstance(s, str) else bytes(s) for s in strings]
  return b''.join([*(varint(len(s)) for s in encoded), *encoded])


def decode_strings(content: bytes | memoryview, count: int) -> list[bytes]:
  """The inverse of `encode_strings`; allocates no more than `content` holds.

  Raises:
    ValueError: `content` does not hold exactly `count` strings.
  """
  if not 0 <= count <= len(content):
    raise ValueError(f'{len(content)} bytes cannot hold {count} strings')
  offset, sizes = 0, []
  for _ in range(count):
    size, offset = read_varint(content, offset)
    sizes.append(size)
  if offset + sum(sizes) != len(content):
    raise ValueError(
      f'{len(content)} bytes do not hold strings of {sum(sizes)} bytes'
    )
  strings = []
  for size in sizes:
    strings.append(bytes(content[offset : offset + size]))
    offset += size
  return strings


def literal_header(num_bytes: int) -> bytes:
  """What makes `num_bytes` bytes behind it a Snappy block, not compressed.

  A block is its uncompressed size as a varint and then its elements; one of a
  single literal costs a copy less than to compress what does not shrink.
  """
  if num_bytes == 0:
    return b'\0'
  last = num_bytes - 1
  if last < 60:
    return varint(num_bytes) + bytes((last << 2,))
  size = (last.bit_length() + 7) // 8  # Of `last`, which follows the tag.
  return (
    varint(num_bytes) + bytes((59 + size << 2,)) + last.to_bytes(size, 'little')
  )  # pyformat: skip
