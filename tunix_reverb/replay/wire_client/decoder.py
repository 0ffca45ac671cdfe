"""Sampled items out of the bytes that a replay server streams.

The messages are read where they lie: columns are decompressed from there
straight into the arrays that the caller gets, and nothing else is copied. What
cannot be read for whatever reason costs its item, never the reader: one
`PoisonItemError` names the item's key, and no array is allocated that its
compressed bytes could not fill.

An entry of a response holds chunks, and a chunk holds one tensor per column,
time leading. A column of an item is one slice of such a tensor, or several
laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import cramjam
from google.protobuf import message as message_lib
import numpy as np

from tunix_reverb import errors
from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import protocol
from tunix_reverb.replay.wire_client import tensors as tensors_lib
from tunix_reverb.replay.wire_client import wire_format

# Slices of a tensor may overlap: bytes that the slices of a column are joined
# to, at most, per byte of the item as it came, and in all.
_MAX_EXPANSION = 1024
_MAX_JOINED_BYTES = 1 << 32

# A key so short could be found in other places of a layout as well.
_MIN_KEY_BYTES = 5

# What malformed bytes make this module, or what it calls, raise.
_MALFORMED = (
  ValueError,
  IndexError,
  OverflowError,
  MemoryError,
  cramjam.DecompressionError,
)


class RawItem(NamedTuple):
  """One item as it was sampled.

  Attributes:
    key: the item's uint64 key.
    table: the table's name.
    priority: the item's priority.
    times_sampled: how often it has been sampled, this time included.
    inserted_at_s: when it was inserted, by the server's clock, in seconds
      since the epoch.
    table_size: items in the table when it was sampled.
    probability: of being chosen.
    columns: one array per column. They may share memory with each other.
  """

  key: int
  table: str
  priority: float
  times_sampled: int
  inserted_at_s: float
  table_size: int
  probability: float
  columns: list[np.ndarray]


# The message in `data[start:stop]`: data, start and stop.
Span = tuple[bytes, int, int]


class EncodedItem(NamedTuple):
  """A sampled item before it is decoded: its SampleInfo and its ChunkDatas."""

  info: Span
  chunks: list[Span]


class Splitter:
  """Cuts the responses of one stream into items; no copies, no decoding."""

  def __init__(self) -> None:
    self._info: Span = (b'', 0, 0)
    self._chunks: list[Span] = []

  def split(self, response: bytes) -> list[EncodedItem]:
    """The items that end in this response; they refer to its bytes.

    Args:
      response: a SampleStreamResponse.

    Raises:
      errors.PoisonItemError: it is no such message. Nothing of its stream can
        be told apart any more, and no key is named.
    """
    items: list[EncodedItem] = []
    try:
      for number, value in wire_format.fields(response, 0, len(response)):
        if number == 1:
          self._add_entry(response, *wire_format.span(value), items)
    except (ValueError, IndexError) as e:
      raise errors.PoisonItemError(
        f'a response of the replay server cannot be read: {e}', key=None
      ) from e
    return items

  def _add_entry(
    self, data: bytes, start: int, stop: int, items: list[EncodedItem]
  ) -> None:
    """Reads a SampleEntry."""
    ended = False
    while start < stop:
      tag, size = data[start], data[start + 1]
      start += 2
      if size >= 0x80:
        size, start = wire_format.varint(data, start - 1)
      if tag == 0x18:
        ended = size != 0
        continue
      end = start + size
      if end > stop:
        raise ValueError(f'a field ends at byte {end} of {stop}')
      if tag == 0x12:
        self._chunks.append((data, start, end))
      elif tag == 0x0A:
        self._info = (data, start, end)
      else:
        raise ValueError(f'an entry has a field of tag {tag} at byte {start}')
      start = end
    if ended:
      items.append(EncodedItem(self._info, self._chunks))
      self._info, self._chunks = (b'', 0, 0), []


class _Chunk(NamedTuple):
  """A ChunkData whose tensors are in `data[start:stop]`."""

  data: bytes
  start: int
  stop: int
  delta_encoded: bool

  def tensors(self) -> list[tuple[int, int]]:
    """Where each TensorProto starts and stops."""
    fields = wire_format.fields(self.data, self.start, self.stop)
    return [
      wire_format.span(tensor) for number, tensor in fields if number == 1
    ]


class _Slice(NamedTuple):
  """`length` timesteps from `offset` on of tensor `index` of a chunk."""

  chunk_key: int
  offset: int
  length: int
  index: int


class _Column(NamedTuple):
  slices: list[_Slice]
  squeeze: bool


class _Layout(NamedTuple):
  """A FlatTrajectory cut at its chunk's key, and its number of columns."""

  pieces: list[bytes]
  count: int


class Decoder:
  """Decodes items; remembers the headers that they have in common.

  Args:
    dtypes: of each column, where raw integers are to be viewed as the bfloat16
      or float8 that they stand for; None: arrays as they were stored.
    whole_arrays: each column must be one whole array, that is, one timestep of
      its writer's, and comes without the axis of that timestep. Otherwise
      columns come as the official client gives them: with a time axis unless
      the writer had it squeezed.
  """

  def __init__(
    self,
    *,
    dtypes: Sequence[np.dtype] | None = None,
    whole_arrays: bool = True,
  ):
    self._dtypes = dtypes
    self._whole_arrays = whole_arrays
    self._tensors = tensors_lib.TensorReader()
    # The last one, by the length of the key: so do the sizes in it differ.
    self._layouts: dict[int, _Layout] = {}

  def decode(self, item: EncodedItem) -> RawItem:
    """The item with its columns.

    Raises:
      errors.PoisonItemError: it cannot be read; it names the key, and says in
        which column what is wrong.
    """
    data, start, stop = item.info
    try:
      info = protocol.SampleInfo.FromString(data[start:stop])
    except message_lib.DecodeError as e:
      raise errors.PoisonItemError(
        f'an item without a readable key came from the replay server: {e}',
        key=None,
      ) from e
    facts = info.item
    try:
      columns = self._columns(facts.flat_trajectory, item.chunks)
    except _MALFORMED as e:
      raise errors.PoisonItemError(
        f'item {facts.key} of table {facts.table!r} cannot be read: {e}',
        key=facts.key,
      ) from e
    inserted_at = facts.inserted_at
    return RawItem(
      facts.key,
      facts.table,
      facts.priority,
      facts.times_sampled,
      inserted_at.seconds + 1e-9 * inserted_at.nanos,
      info.table_size,
      info.probability,
      columns,
    )

  def _columns(self, trajectory: Any, spans: list[Span]) -> list[np.ndarray]:
    """Decodes every column of a FlatTrajectory."""
    columns = None
    if self._whole_arrays and len(spans) == 1:
      columns = self._whole_columns(trajectory, *spans[0])
    if columns is None:
      size = sum(stop - start for _, start, stop in spans)
      columns = _ColumnReader(
        dict(_read_chunk(*span) for span in spans),
        self._tensors,
        squeeze_all=self._whole_arrays,
        max_joined_bytes=min(_MAX_JOINED_BYTES, _MAX_EXPANSION * size),
      ).read(_read_layout(trajectory))
    if self._dtypes is not None:
      columns = [codec.view_as(a, d) for a, d in zip(columns, self._dtypes)]
    return columns

  def _whole_columns(
    self, trajectory: Any, data: bytes, start: int, stop: int
  ) -> list[np.ndarray] | None:
    """The rows of the only chunk, if nothing about it is unusual."""
    try:
      key, chunk = _read_chunk(data, start, stop)
      count = self._num_whole_columns(trajectory, key)
      # A single row is as it was before delta encoding.
      return self._tensors.read_rows(*chunk[:3], count) if count else None
    except _MALFORMED:
      return None

  def _num_whole_columns(self, trajectory: Any, key: bytes) -> int:
    """The number of columns if column i is the first row of tensor i, else 0.

    Items that differ in the chunk's key alone are read once.
    """
    encoded = trajectory.SerializeToString()
    key_field = b'\x08' + key
    layout = self._layouts.get(len(key))
    if layout is not None and key_field.join(layout.pieces) == encoded:
      return layout.count
    count = _count_whole(_read_layout(trajectory))
    pieces = encoded.split(key_field)
    if len(key) >= _MIN_KEY_BYTES and len(pieces) == 1 + count:
      self._layouts[len(key)] = _Layout(pieces, count)
    return count


class _ColumnReader:
  """Decodes the columns of one item, whatever its layout."""

  def __init__(
    self,
    chunks: dict[bytes, _Chunk],
    reader: tensors_lib.TensorReader,
    *,
    squeeze_all: bool,
    max_joined_bytes: int,
  ):
    """Args: as `Decoder`'s; `chunks` by their keys as they are encoded."""
    self._chunks = chunks
    self._reader = reader
    self._squeeze_all = squeeze_all
    self._max_joined_bytes = max_joined_bytes
    self._spans = {key: chunk.tensors() for key, chunk in chunks.items()}
    self._decoded: dict[tuple[bytes, int], np.ndarray] = {}

  def read(self, columns: list[_Column]) -> list[np.ndarray]:
    """The columns' arrays.

    Raises:
      ValueError: one is malformed; names it.
    """
    arrays: list[np.ndarray] = []
    try:
      for column in columns:
        arrays.append(self._column(column))
    except _MALFORMED as e:
      raise ValueError(f'column {len(arrays)}: {e}') from e
    return arrays

  def _column(self, column: _Column) -> np.ndarray:
    slices = [self._slice(part) for part in column.slices]
    if not slices:
      raise ValueError('it has no slices')
    array = slices[0] if len(slices) == 1 else self._join(slices)
    if not (column.squeeze or self._squeeze_all):
      return array
    if array.shape[0] != 1:
      raise ValueError(f'its {array.shape[0]} timesteps must be one')
    return array[0, ...]

  def _slice(self, part: _Slice) -> np.ndarray:
    number, offset, length, index = part
    key = codec.varint(number)
    if key not in self._chunks:
      raise ValueError(f'chunk {number} is missing')
    if not 0 <= index < len(self._spans[key]):
      raise ValueError(
        f'its index ({index}) must be one of the {len(self._spans[key])} '
        f'tensors of chunk {number}'
      )
    array = self._decoded.get((key, index))
    if array is None:
      chunk = self._chunks[key]
      array = self._reader.read(
        chunk.data, *self._spans[key][index], chunk.delta_encoded
      )
      self._decoded[key, index] = array
    if offset < 0 or length < 0 or offset + length > array.shape[0]:
      raise ValueError(
        f'its slice of {length} timesteps from {offset} on must lie within '
        f'the {array.shape[0]} of chunk {number}'
      )
    return array[offset : offset + length]

  def _join(self, slices: list[np.ndarray]) -> np.ndarray:
    """Lays slices end to end."""
    first = slices[0]
    for array in slices:
      if array.dtype != first.dtype or array.shape[1:] != first.shape[1:]:
        raise ValueError(
          f'its slices must agree: {first.dtype} of shape {first.shape}, and '
          f'{array.dtype} of shape {array.shape}'
        )
    num_bytes = sum(array.nbytes for array in slices)
    if num_bytes > self._max_joined_bytes:
      raise ValueError(
        f'its slices join to {num_bytes} bytes, over {self._max_joined_bytes}'
      )
    return np.concatenate(slices)


def _read_chunk(data: bytes, start: int, stop: int) -> tuple[bytes, _Chunk]:
  """Key of a ChunkData, as it is encoded, and what it holds.

  The server orders fields by number: what follows the tensors are sizes.
  """
  key, delta_encoded = b'\0', False
  while start < stop:
    tag = data[start]
    start += 1
    if tag == 0x08:
      end = start
      while data[end] >= 0x80:
        end += 1
      end += 1
      key = data[start:end]
    else:
      value, end = wire_format.varint(data, start)
      if tag == 0x20:
        delta_encoded = value != 0
      elif tag == 0x2A and end + value <= stop:
        return key, _Chunk(data, end, end + value, delta_encoded)
      elif tag == 0x12:
        end += value
      elif tag & 7:
        raise ValueError(f'a chunk has a field of tag {tag} at byte {start}')
    start = end
  return key, _Chunk(data, stop, stop, delta_encoded)


def _read_layout(trajectory: Any) -> list[_Column]:
  """Reads a FlatTrajectory."""
  columns = [
    _Column(
      [
        _Slice(s.chunk_key, s.offset, s.length, s.index)
        for s in column.chunk_slices
      ],
      column.squeeze,
    )
    for column in trajectory.columns
  ]
  if not columns:
    raise ValueError('it has no columns')
  return columns


def _count_whole(columns: list[_Column]) -> int:
  """The number of columns if column i is the first row of tensor i, else 0."""
  if not columns[0].slices:
    return 0
  first = columns[0].slices[0]
  if first[1:] != (0, 1, 0):
    return 0
  for i, column in enumerate(columns):
    if column.slices != [first._replace(index=i)]:
      return 0
  return len(columns)
