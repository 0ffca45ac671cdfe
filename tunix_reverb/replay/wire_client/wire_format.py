"""Protobuf's encoding, read where it lies, without a copy of what it holds."""

from __future__ import annotations

from collections.abc import Iterator

# Of a field: the number in a varint, or where a message, bytes, a string or a
# fixed number starts and stops.
Value = int | tuple[int, int]

_MAX_VARINT_BYTES = 10


def fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, Value]]:
  """Number and value of each field of the message in `data[start:stop]`.

  Raises:
    ValueError: it is no message.
    IndexError: it ends too early, and `data` with it.
  """
  offset = start
  while offset < stop:
    tag = data[offset]
    offset += 1
    if tag >= 0x80:
      tag, offset = varint(data, offset - 1)
    kind = tag & 7
    if kind == 2:
      size = data[offset]
      offset += 1
      if size >= 0x80:
        size, offset = varint(data, offset - 1)
      value: Value = (offset, offset + size)
      offset += size
    elif kind == 0:
      value, offset = varint(data, offset)
    elif kind == 1 or kind == 5:
      size = 8 if kind == 1 else 4
      value = (offset, offset + size)
      offset += size
    else:
      raise ValueError(f'a field at byte {offset} has wire type {kind}')
    if offset > stop:
      raise ValueError(f'a field ends at byte {offset} of {stop}')
    yield tag >> 3, value


def varint(data: bytes, offset: int) -> tuple[int, int]:
  """The unsigned number at `offset`, and the offset behind it.

  Raises:
    ValueError: it is too long.
    IndexError: `data` ends before it does.
  """
  value = data[offset]
  if value < 0x80:
    return value, offset + 1
  value &= 0x7F
  for i in range(1, _MAX_VARINT_BYTES):
    byte = data[offset + i]
    if byte < 0x80:
      return value | byte << 7 * i, offset + i + 1
    value |= (byte & 0x7F) << 7 * i
  raise ValueError(f'a varint at byte {offset} has no end')


def span(value: Value) -> tuple[int, int]:
  """Where the message, bytes or string starts and stops.

  Raises:
    ValueError: the field holds a varint.
  """
  if isinstance(value, int):
    raise ValueError('a number stands where a message should')
  return value


def number(value: Value) -> int:
  """An unsigned number of 64 bits.

  Raises:
    ValueError: the field holds no varint.
  """
  if not isinstance(value, int):
    raise ValueError('a message stands where a number should')
  return value & 0xFFFF_FFFF_FFFF_FFFF


def signed(value: Value) -> int:
  """A signed number of 64 bits, in two's complement.

  Raises:
    ValueError: the field holds no varint.
  """
  unsigned = number(value)
  return unsigned - (1 << 64) if unsigned >> 63 else unsigned
