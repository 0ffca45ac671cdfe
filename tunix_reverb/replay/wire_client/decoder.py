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
import math
from typing import Any
from typing import NamedTuple

import cramjam
from google.protobuf import message as message_lib
import numpy as np

from tunix_reverb import errors
from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import protocol
from tunix_reverb.replay.wire_client import wire_format

# The densest element of a Snappy block makes 64 bytes out of 3.
_MAX_RATIO = 22

# Slices of a tensor may overlap: bytes that the slices of a column are joined
# to, at most, per byte of the item as it came, and in all.
_MAX_EXPANSION = 1024
_MAX_JOINED_BYTES = 1 << 32

# Headers and layouts remembered; they differ little from item to item.
_MAX_REMEMBERED = 4096
_MAX_LAYOUT_BYTES = 1 << 14

# What malformed bytes make this module, or what it calls, raise.
_MALFORMED = (
  ValueError,
  IndexError,
  OverflowError,
  MemoryError,
  cramjam.DecompressionError,
  message_lib.DecodeError,
)

_decompress_into = cramjam.snappy.decompress_raw_into


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


class Span(NamedTuple):
  """The message in `data[start:stop]`."""

  data: bytes
  start: int
  stop: int


class EncodedItem(NamedTuple):
  """A sampled item before it is decoded: its SampleInfo and its ChunkDatas."""

  info: Span
  chunks: list[Span]


class Splitter:
  """Cuts the responses of one stream into items; no copies, no decoding."""

  def __init__(self) -> None:
    self._info = Span(b'', 0, 0)
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
          self._add_entry(response, wire_format.span(value), items)
    except (ValueError, IndexError) as e:
      raise errors.PoisonItemError(
        f'a response of the replay server cannot be read: {e}', key=None
      ) from e
    return items

  def _add_entry(
    self, data: bytes, entry: tuple[int, int], items: list[EncodedItem]
  ) -> None:
    ended = False
    for number, value in wire_format.fields(data, *entry):
      if number == 2:
        self._chunks.append(Span(data, *wire_format.span(value)))
      elif number == 1:
        self._info = Span(data, *wire_format.span(value))
      elif number == 3:
        ended = wire_format.number(value) != 0
    if ended:
      items.append(EncodedItem(self._info, self._chunks))
      self._info, self._chunks = Span(b'', 0, 0), []


class _Chunk(NamedTuple):
  """A ChunkData; `tensors` are where its TensorProtos start and stop."""

  data: bytes
  tensors: list[tuple[int, int]]
  delta_encoded: bool


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
  """An item's columns; `simple` if column i is the one row of tensor i."""

  columns: list[_Column]
  simple: bool


class _Form(NamedTuple):
  """What a tensor's dtype and shape say."""

  dtype: np.dtype
  shape: tuple[int, ...]
  num_bytes: int


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
    self._forms: dict[bytes, _Form] = {}
    self._layouts: dict[tuple[bytes, ...], _Layout] = {}

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
    chunks = dict(_read_chunk(span) for span in spans)
    layout = self._layout(trajectory, chunks)
    if layout.simple and self._whole_arrays:
      columns = self._simple_columns(len(layout.columns), chunks)
    else:
      limit = min(
        _MAX_JOINED_BYTES,
        _MAX_EXPANSION * sum(span.stop - span.start for span in spans),
      )
      decoded: dict[tuple[int, int], np.ndarray] = {}
      columns = []
      for i, column in enumerate(layout.columns):
        try:
          columns.append(self._column(column, chunks, decoded, limit))
        except _MALFORMED as e:
          raise ValueError(f'column {i}: {e}') from e
    if self._dtypes is not None:
      columns = [codec.view_as(a, d) for a, d in zip(columns, self._dtypes)]
    return columns

  def _layout(self, trajectory: Any, chunks: dict[int, _Chunk]) -> _Layout:
    """Reads the layout, unless an item differed in the chunk's key alone."""
    # Slices name their chunk: only where they are not looked at may a layout
    # serve for another item.
    if len(chunks) != 1 or not self._whole_arrays:
      return _read_layout(trajectory)
    (key,) = chunks
    encoded = trajectory.SerializeToString()
    # A short key could be found in other places as well.
    if key < 1 << 28 or len(encoded) > _MAX_LAYOUT_BYTES:
      return _read_layout(trajectory)
    pieces = tuple(encoded.split(b'\x08' + codec.varint(key)))
    layout = self._layouts.get(pieces)
    if layout is None:
      layout = _read_layout(trajectory)
      if layout.simple and len(pieces) == 1 + len(layout.columns):
        _remember(self._layouts, pieces, layout)
    return layout

  def _simple_columns(
    self, num_columns: int, chunks: dict[int, _Chunk]
  ) -> list[np.ndarray]:
    """The whole arrays of the only chunk."""
    (chunk,) = chunks.values()
    if len(chunk.tensors) < num_columns:
      raise ValueError(
        f'its chunk has {len(chunk.tensors)} tensors for {num_columns} columns'
      )
    columns: list[np.ndarray] = []
    try:
      for start, stop in chunk.tensors[:num_columns]:
        array = self._tensor(chunk.data, start, stop)
        if array.shape[0] != 1:
          raise ValueError(_no_whole_array(array))
        # A single row is not changed by delta encoding.
        columns.append(array[0, ...])
    except _MALFORMED as e:
      raise ValueError(f'column {len(columns)}: {e}') from e
    return columns

  def _column(
    self,
    column: _Column,
    chunks: dict[int, _Chunk],
    decoded: dict[tuple[int, int], np.ndarray],
    limit: int,
  ) -> np.ndarray:
    """Decodes one column, whatever its layout.

    Args:
      column: its slices.
      chunks: by key.
      decoded: tensors of this item by key of their chunk and index.
      limit: bytes that slices may be joined to.
    """
    slices = [self._slice(s, chunks, decoded) for s in column.slices]
    if not slices:
      raise ValueError('it has no slices')
    array = slices[0] if len(slices) == 1 else _join(slices, limit)
    if not (column.squeeze or self._whole_arrays):
      return array
    if array.shape[0] != 1:
      raise ValueError(_no_whole_array(array))
    return array[0, ...]

  def _slice(
    self,
    part: _Slice,
    chunks: dict[int, _Chunk],
    decoded: dict[tuple[int, int], np.ndarray],
  ) -> np.ndarray:
    key, offset, length, index = part
    if key not in chunks:
      raise ValueError(f'chunk {key} is missing')
    chunk = chunks[key]
    if not 0 <= index < len(chunk.tensors):
      raise ValueError(
        f'its index ({index}) must be one of the {len(chunk.tensors)} tensors '
        f'of chunk {key}'
      )
    array = decoded.get((key, index))
    if array is None:
      array = self._tensor(chunk.data, *chunk.tensors[index])
      if chunk.delta_encoded:
        _undo_delta(array)
      decoded[key, index] = array
    if offset < 0 or length < 0 or offset + length > array.shape[0]:
      raise ValueError(
        f'its slice of {length} timesteps from {offset} on must lie within '
        f'the {array.shape[0]} of chunk {key}'
      )
    return array[offset : offset + length]

  def _tensor(self, data: bytes, start: int, stop: int) -> np.ndarray:
    """Decodes a TensorProto but for its delta encoding."""
    # As every writer orders it: dtype, shape, content, once each.
    middle = start + 4 + data[start + 3]
    form = self._forms.get(data[start:middle])
    if form is not None and data[middle] == _CONTENT_TAG:
      size, offset = wire_format.varint(data, middle + 1)
      if offset + size == stop:
        return _fill(form, memoryview(data)[offset:stop])
    tensor = protocol.TensorProto.FromString(data[start:stop])
    form = _read_form(tensor)
    content = tensor.tensor_content
    tensor.ClearField('tensor_content')
    header = tensor.SerializeToString()
    if header == data[start:middle]:
      _remember(self._forms, header, form)
    return _fill(form, content)


_CONTENT_TAG = 0x22


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
  if len(memory) >= _MAX_REMEMBERED:
    memory.clear()
  memory[key] = value


def _read_chunk(span: Span) -> tuple[int, _Chunk]:
  """Key of a ChunkData, and where its tensors are."""
  key, delta_encoded = 0, False
  tensors: list[tuple[int, int]] = []
  data = span.data
  for number, value in wire_format.fields(*span):
    if number == 1:
      key = wire_format.number(value)
    elif number == 4:
      delta_encoded = wire_format.number(value) != 0
    elif number == 5:
      for index, tensor in wire_format.fields(data, *wire_format.span(value)):
        if index == 1:
          tensors.append(wire_format.span(tensor))
  return key, _Chunk(data, tensors, delta_encoded)


def _read_layout(trajectory: Any) -> _Layout:
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
  return _Layout(columns, _is_simple(columns))


def _is_simple(columns: list[_Column]) -> bool:
  if not columns[0].slices:
    return False
  first = columns[0].slices[0]
  return first[1:] == (0, 1, 0) and all(
    column.slices == [first._replace(index=i)]
    for i, column in enumerate(columns)
  )


def _read_form(tensor: Any) -> _Form:
  """Reads dtype and shape of a TensorProto."""
  dtype = codec.DTYPES.get(tensor.dtype)
  if dtype is None:
    raise ValueError(f'its dtype ({tensor.dtype}) is unknown')
  shape = tuple(dim.size for dim in tensor.tensor_shape.dim)
  if not shape or min(shape) < 0:
    raise ValueError(
      f'its shape ({list(shape)}) must have a time axis and no size below 0'
    )
  return _Form(dtype, shape, math.prod(shape) * dtype.itemsize)


def _fill(form: _Form, content: bytes | memoryview) -> np.ndarray:
  """A new array of `form` with the elements in `content`."""
  dtype, shape, num_bytes = form
  if num_bytes > _MAX_RATIO * len(content):
    raise ValueError(
      f'{len(content)} bytes cannot hold {dtype} of shape {list(shape)}'
    )
  if dtype.hasobject:
    strings = codec.decode_strings(content, math.prod(shape))
    array = np.empty(len(strings), dtype)
    array[:] = strings
    return array.reshape(shape)
  array = np.empty(shape, dtype)
  if len(content) and _decompress_into(content, array) != num_bytes:
    raise ValueError(f'its content must fill {dtype} of shape {list(shape)}')
  return array


def _undo_delta(array: np.ndarray) -> None:
  """Sums up along axis 0, in place, where Reverb differences."""
  if array.dtype.kind in 'iu' and array.ndim >= 2:
    unsigned = array.view(f'u{array.dtype.itemsize}')
    np.add.accumulate(unsigned, axis=0, dtype=unsigned.dtype, out=unsigned)


def _join(slices: list[np.ndarray], limit: int) -> np.ndarray:
  """Lays slices end to end."""
  first = slices[0]
  for array in slices:
    if array.dtype != first.dtype or array.shape[1:] != first.shape[1:]:
      raise ValueError(
        f'its slices must agree: {first.dtype} of shape {first.shape}, and '
        f'{array.dtype} of shape {array.shape}'
      )
  num_bytes = sum(array.nbytes for array in slices)
  if num_bytes > limit:
    raise ValueError(f'its slices join to {num_bytes} bytes, over {limit}')
  return np.concatenate(slices)


def _no_whole_array(array: np.ndarray) -> str:
  return f'its {array.shape[0]} timesteps must be one'
