"""Arrays to the bytes of an InsertStreamRequest.

The bytes are assembled by hand: protobuf's Python objects would cost several
times the rest of an insert. What depends on dtypes and shapes alone is computed
once and kept; an item is then its arrays between constant headers. Protobuf
lets the parts of a request follow each other in any order, so a request is its
items' bytes, one after the other.

An item is what the official legacy writer makes of whole arrays: one chunk of
one timestep with a tensor per column, whose leading axis of 1 is the timestep.
"""

from __future__ import annotations

from collections.abc import Sequence
import struct
from typing import NamedTuple

import cramjam
import numpy as np

from tunix_reverb.replay.wire_client import codec

# A message may hold less than 2 GiB.
_MAX_BYTES = 2**31 - 2**16

# Shorter columns are stored as they are, in one literal.
_MIN_COMPRESSED_BYTES = 1024
# What shrinks less is stored as it is, and so are the next so many of the
# column: random floats and tokens do not shrink.
_MAX_RATIO = 0.9
_SKIPPED_AFTER_FAILURE = 31

# Smaller items are put together at once, larger ones with their request: then
# their arrays are copied once only.
_MAX_JOINED_BYTES = 2**14

_MAX_LAYOUTS = 4096

# Field numbers and wire types of the protocol (see reverb.proto).
_REQUEST_CHUNKS = b'\x0a'
_REQUEST_ITEMS = b'\x12'
_CHUNK_KEY = b'\x08'
_CHUNK_SEQUENCE_RANGE = b'\x12'
_RANGE_EPISODE_ID = b'\x08'
_CHUNK_DATA = b'\x2a'
_CHUNK_NUM_TENSORS = b'\x30'
_CHUNK_UNCOMPRESSED_SIZE = b'\x38'
_DATA_TENSORS = b'\x0a'
_TENSOR_DTYPE = b'\x08'
_TENSOR_SHAPE = b'\x12'
_SHAPE_DIM = b'\x12'
_DIM_SIZE = b'\x08'
_TENSOR_CONTENT = b'\x22'
_ITEM_KEY = b'\x08'
_ITEM_TABLE = b'\x12'
_ITEM_PRIORITY = b'\x29'
_ITEM_TRAJECTORY = b'\x42'
_TRAJECTORY_COLUMNS = b'\x0a'
_COLUMN_SLICES = b'\x0a'
_SLICE_CHUNK_KEY = b'\x08'
_SLICE_LENGTH_1 = b'\x18\x01'
_SLICE_INDEX = b'\x20'

_double = struct.Struct('<d').pack


class Encoded(NamedTuple):
  """Part of a request: `parts` one after the other, `num_bytes` in all."""

  parts: list
  num_bytes: int


class Layout:
  """What the dtypes and shapes of an item's columns say about its bytes.

  Attributes:
    num_columns: of the item.
    num_bytes: of the columns' elements; 0 for each string.
    num_transitions: for the writer, which notes that these shapes agree.
  """

  def __init__(self, columns: Sequence[np.ndarray]):
    """Args: columns: one or more arrays of these dtypes and shapes."""
    if not len(columns):
      raise ValueError('an item must have a column')
    self.num_columns = len(columns)
    self.num_transitions: int | None = None
    self.num_bytes = 0
    # By column: the tensor up to its content; the same behind its own length
    # and with what precedes a literal; where the elements are not used as they
    # are, the dtype to take; the columns that are not always a literal.
    self._tensors: list[bytes] = []
    self.literals: list[bytes] = []
    self.conversions: list[tuple[int, np.dtype]] = []
    self.compressed: list[int] = []
    self.strings: list[int] = []
    for i, column in enumerate(columns):
      self._add(i, column)
    if self.num_bytes > _MAX_BYTES:
      raise ValueError(
        f'an item ({self.num_bytes} bytes) must be smaller than 2 GiB: split it'
      )
    self.literal_bytes = self.num_bytes + sum(map(len, self.literals))
    self.tail = (
      _CHUNK_NUM_TENSORS
      + codec.varint(self.num_columns)
      + _CHUNK_UNCOMPRESSED_SIZE
      + codec.varint(self.num_bytes)
    )

  def header(self, column: int, content_bytes: int) -> bytes:
    """What precedes a column's content when its size is not known before."""
    tensor = self._tensors[column] + codec.varint(content_bytes)
    return _DATA_TENSORS + codec.varint(len(tensor) + content_bytes) + tensor

  def _add(self, i: int, column: np.ndarray) -> None:
    stored = codec.stored_dtype(column.dtype)
    shape = b''.join(_field(_SHAPE_DIM, _dim(n)) for n in (1, *column.shape))
    number = codec.STRING if stored.hasobject else codec.NUMBERS[stored]
    self._tensors.append(
      _TENSOR_DTYPE
      + codec.varint(number)
      + _field(_TENSOR_SHAPE, shape)
      + _TENSOR_CONTENT
    )
    if stored.hasobject:
      self.strings.append(i)
      self.literals.append(b'')
      return
    if stored != column.dtype:
      self.conversions.append((i, stored))
    if column.nbytes >= _MIN_COMPRESSED_BYTES:
      self.compressed.append(i)
    snappy = codec.literal_header(column.nbytes)
    self.literals.append(self.header(i, len(snappy) + column.nbytes) + snappy)
    self.num_bytes += column.nbytes


class Encoder:
  """Encodes items; remembers layouts, tables, and which columns shrink.

  One thread at a time.
  """

  def __init__(self) -> None:
    """Starts without knowledge."""
    self._layouts: dict[tuple, Layout] = {}
    self._tables: dict[str, bytes] = {}
    self._trajectories: dict[tuple[int, int], list[bytes]] = {}
    self._skips: dict[int, int] = {}

  def layout(self, columns: Sequence[np.ndarray]) -> Layout:
    """The layout of these columns.

    Raises:
      TypeError: a dtype that Reverb does not store.
      ValueError: no column, or more than 2 GiB.
    """
    key = tuple([(column.dtype, column.shape) for column in columns])
    layout = self._layouts.get(key)
    if layout is None:
      if len(self._layouts) >= _MAX_LAYOUTS:
        self._layouts.clear()
      layout = self._layouts[key] = Layout(columns)
    return layout

  def encode(
    self,
    columns: Sequence[np.ndarray],
    entries: Sequence[tuple[str, int, float]],
    chunk_key: int,
    layout: Layout | None = None,
  ) -> Encoded:
    """Encodes one chunk and the items over it.

    Large arrays are part of the result as they are: they must not change
    before it has been sent.

    Args:
      columns: whole arrays, any shapes.
      entries: (table, key, priority) of each item.
      chunk_key: unique on the server.
      layout: of these columns, if the caller has it.

    Raises:
      TypeError: a dtype that Reverb does not store.
      ValueError: no column, a negative priority or NaN, which would end a
        prioritised table for good, or more than 2 GiB.
    """
    layout = layout or self.layout(columns)
    key = codec.varint(chunk_key)
    parts, num_bytes = self._data(columns, layout)
    chunk = (
      _CHUNK_KEY + key
      + _CHUNK_SEQUENCE_RANGE + codec.varint(1 + len(key))
      + _RANGE_EPISODE_ID + key
      + layout.tail
      + _CHUNK_DATA + codec.varint(num_bytes)
    )  # fmt: skip
    num_bytes += len(chunk)
    head = _REQUEST_CHUNKS + codec.varint(num_bytes) + chunk
    parts[0] = head
    trajectory = self._trajectory(layout.num_columns, key)
    items = b''.join([self._item(*entry, trajectory) for entry in entries])
    parts.append(items)
    num_bytes += len(head) - len(chunk) + len(items)
    if num_bytes <= _MAX_JOINED_BYTES:
      return Encoded([b''.join(parts)], num_bytes)
    return Encoded(parts, num_bytes)

  def _data(
    self, columns: Sequence[np.ndarray], layout: Layout
  ) -> tuple[list, int]:
    """The tensors' parts, behind a place for the chunk's head; their size."""
    parts: list = [None] * (2 * layout.num_columns + 1)
    parts[1::2] = layout.literals
    parts[2::2] = [
      c if c.flags.c_contiguous else c.copy(order='C') for c in columns
    ]
    num_bytes = layout.literal_bytes
    for i, dtype in layout.conversions:
      parts[2 * i + 2] = _as_stored(parts[2 * i + 2], dtype)
    for i in layout.compressed:
      num_bytes += self._compress(parts, i, layout)
    for i in layout.strings:
      content = codec.encode_strings(columns[i].ravel().tolist())
      header = layout.header(i, len(content))
      parts[2 * i + 1 : 2 * i + 3] = header, content
      num_bytes += len(header) + len(content)
    return parts, num_bytes

  def _compress(self, parts: list, i: int, layout: Layout) -> int:
    """Replaces column i by its Snappy block if shorter; returns the change."""
    skips = self._skips.get(i, 0)
    if skips:
      self._skips[i] = skips - 1
      return 0
    array = parts[2 * i + 2]
    content = cramjam.snappy.compress_raw(array)
    content_bytes = len(content)
    if content_bytes > _MAX_RATIO * array.nbytes:
      self._skips[i] = _SKIPPED_AFTER_FAILURE
      return 0
    header = layout.header(i, content_bytes)
    literal_bytes = len(parts[2 * i + 1]) + array.nbytes
    parts[2 * i + 1 : 2 * i + 3] = header, content
    return len(header) + content_bytes - literal_bytes

  def _item(
    self, table: str, key: int, priority: float, trajectory: bytes
  ) -> bytes:
    if not priority >= 0:
      raise ValueError(
        f'priority ({priority}) must be >= 0: anything else ends a prioritised '
        'table'
      )
    name = self._tables.get(table)
    if name is None:
      name = self._tables[table] = _field(_ITEM_TABLE, table.encode())
    item = (
      _ITEM_KEY + codec.varint(int(key)) + name
      + _ITEM_PRIORITY + _double(priority) + trajectory
    )  # fmt: skip
    return _REQUEST_ITEMS + codec.varint(len(item)) + item

  def _trajectory(self, num_columns: int, chunk_key: bytes) -> bytes:
    """Column i is tensor i of the chunk; constant but for the chunk's key."""
    form = num_columns, len(chunk_key)
    between = self._trajectories.get(form)
    if between is None:
      between = self._trajectories[form] = _trajectory_form(*form)
    return chunk_key.join(between)


def _trajectory_form(num_columns: int, key_bytes: int) -> list[bytes]:
  """A flat trajectory, cut wherever a chunk key of `key_bytes` goes."""
  between, end = [], b''
  for i in range(num_columns):
    index = _SLICE_INDEX + codec.varint(i) if i else b''
    slice_bytes = 1 + key_bytes + len(_SLICE_LENGTH_1) + len(index)
    size = codec.varint(slice_bytes)
    column_bytes = 1 + len(size) + slice_bytes
    between.append(
      end
      + _TRAJECTORY_COLUMNS + codec.varint(column_bytes)
      + _COLUMN_SLICES + size
      + _SLICE_CHUNK_KEY
    )  # fmt: skip
    end = _SLICE_LENGTH_1 + index
  between.append(end)
  total = sum(map(len, between)) + num_columns * key_bytes
  between[0] = _ITEM_TRAJECTORY + codec.varint(total) + between[0]
  return between


def _as_stored(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Raw integers of bfloat16 and float8; this machine's byte order."""
  if array.dtype.kind == dtype.kind:
    return array.astype(dtype)
  return array.view(dtype)


def _field(tag: bytes, content: bytes) -> bytes:
  return tag + codec.varint(len(content)) + content


def _dim(size: int) -> bytes:
  return _DIM_SIZE + codec.varint(size) if size else b''
