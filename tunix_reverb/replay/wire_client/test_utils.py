"""Messages of a replay server's protocol for tests, sound ones and poison.

Built with protobuf's classes and cramjam alone, so that they owe nothing to the
encoder and decoder that they test. Not imported by the library.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from cramjam import snappy
import numpy as np

from tunix_reverb import errors
from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import decoder
from tunix_reverb.replay.wire_client import protocol

_NUMBERS = {dtype: number for number, dtype in codec.DTYPES.items()}


def tensor(array: np.ndarray, content: bytes | None = None) -> Any:
  """A TensorProto of `array`; objects are bytes. `content` as it is stored."""
  proto = protocol.TensorProto(dtype=_NUMBERS[array.dtype])
  for size in array.shape:
    proto.tensor_shape.dim.add(size=size)
  if content is None:
    if array.dtype == object:
      content = codec.encode_strings(array.ravel().tolist())
    else:
      content = bytes(snappy.compress_raw(array.tobytes()))
  proto.tensor_content = content
  return proto


def delta(array: np.ndarray) -> np.ndarray:
  """`array` as delta encoding stores it: integers differenced along axis 0."""
  if array.dtype.kind not in 'iu' or array.ndim < 2:
    return array
  encoded = array.copy()
  with np.errstate(over='ignore'):
    encoded[1:] -= array[:-1]
  return encoded


def chunk(
  key: int, arrays: Sequence[np.ndarray], *, delta_encoded: bool = False
) -> Any:
  """A ChunkData of one tensor per array, time leading."""
  proto = protocol.ChunkData(chunk_key=key, delta_encoded=delta_encoded)
  proto.data.tensors.extend(
    tensor(delta(array) if delta_encoded else array) for array in arrays
  )
  proto.data_tensors_len = len(arrays)
  proto.data_uncompressed_size = sum(array.nbytes for array in arrays)
  return proto


def item(
  key: int,
  columns: Sequence[tuple[Sequence[tuple[int, int, int, int]], bool]],
  *,
  table: str = 'trajectories',
  priority: float = 1.0,
) -> Any:
  """A PrioritizedItem.

  Args:
    key: the item's.
    columns: of each, its slices (chunk key, offset, length, index of the
      tensor) and whether its time axis is squeezed away.
    table: its table.
    priority: its priority.
  """
  proto = protocol.PrioritizedItem(key=key, table=table, priority=priority)
  for slices, squeeze in columns:
    column = proto.flat_trajectory.columns.add(squeeze=squeeze)
    for chunk_key, offset, length, index in slices:
      column.chunk_slices.add(
        chunk_key=chunk_key, offset=offset, length=length, index=index
      )
  return proto


def whole_item(key: int, chunk_key: int, num_columns: int, **kwargs) -> Any:
  """The item whose columns are the first timestep of a chunk's tensors."""
  columns = [([(chunk_key, 0, 1, i)], False) for i in range(num_columns)]
  return item(key, columns, **kwargs)


def response(
  samples: Sequence[tuple[Any, Sequence[Any]]], *, chunks_per_entry: int = 8
) -> Any:
  """A SampleStreamResponse of (item, chunks) pairs."""
  proto = protocol.SampleStreamResponse()
  for sampled, chunks in samples:
    for start in range(0, max(1, len(chunks)), chunks_per_entry):
      entry = proto.entries.add()
      if start == 0:
        entry.info.item.CopyFrom(sampled)
        entry.info.item.times_sampled = 1
        entry.info.item.inserted_at.seconds = 1_700_000_000
        entry.info.item.inserted_at.nanos = 500_000_000
        entry.info.probability = 0.5
        entry.info.table_size = 3
      entry.data.extend(chunks[start : start + chunks_per_entry])
    proto.entries[-1].end_of_sequence = True
  return proto


def _set(**fields: Any) -> Callable[[Any, Any], None]:
  """Changes the first tensor of the chunk."""

  def change(chunk_proto: Any, item_proto: Any) -> None:
    for name, value in fields.items():
      setattr(chunk_proto.data.tensors[0], name, value)

  return change


def _resize(*shape: int) -> Callable[[Any, Any], None]:
  """Gives the first tensor of the chunk another shape."""

  def change(chunk_proto: Any, item_proto: Any) -> None:
    del chunk_proto.data.tensors[0].tensor_shape.dim[:]
    for size in shape:
      chunk_proto.data.tensors[0].tensor_shape.dim.add(size=size)

  return change


def _slice(**fields: int) -> Callable[[Any, Any], None]:
  """Changes the slice of the first column."""

  def change(chunk_proto: Any, item_proto: Any) -> None:
    for name, value in fields.items():
      setattr(
        item_proto.flat_trajectory.columns[0].chunk_slices[0], name, value
      )

  return change


def _strings(chunk_proto: Any, item_proto: Any) -> None:
  chunk_proto.data.tensors[0].dtype = codec.STRING
  chunk_proto.data.tensors[0].tensor_content = b'\xff\xff\xff\xff\x0f'


# What is wrong with a poison item, and how to make a sound one that: the first
# of its columns is float32 [1, 4], stored in 16 bytes that do not compress.
POISON: dict[str, Callable[[Any, Any], None]] = {
  'no dtype': _set(dtype=0),
  'unknown dtype': _set(dtype=999),
  'dtype of a resource': _set(dtype=20),
  'no shape': _resize(),
  'negative size': _resize(1, -4),
  'huge size': _resize(1, 2**40),
  'huge product': _resize(1, 2**31, 2**31, 2**31),
  'huge beside an empty axis': _resize(1, 2**62, 0, 2**62),
  'too many axes': _resize(1, 4, *[1] * 100),
  'shape above content': _resize(1, 6),
  'shape below content': _resize(1, 2),
  'no content': _set(tensor_content=b''),
  'empty block': _set(tensor_content=b'\0'),
  'corrupt block': _set(tensor_content=b'\x10\xfe\x01\x00\xff\xff'),
  'truncated block': _set(tensor_content=b'\x10\x3c\x01\x02\x03'),
  'block that claims 4 GB': _set(
    tensor_content=b'\xff\xff\xff\xff\x0f\x3c' * 2
  ),
  'bad strings': _strings,
  'negative offset': _slice(offset=-1),
  'offset beyond the end': _slice(offset=7),
  'negative length': _slice(length=-1),
  'length beyond the end': _slice(length=2**31 - 1),
  'negative index': _slice(index=-1),
  'index beyond the last tensor': _slice(index=99),
  'no tensors': lambda chunk_proto, item_proto: chunk_proto.ClearField('data'),
}


def poison(kind: str, chunk_proto: Any, item_proto: Any) -> None:
  """Makes a sound item poison in one of the ways of `POISON`."""
  POISON[kind](chunk_proto, item_proto)


def read_anything(message: bytes) -> None:
  """Decodes a response as far as it can be decoded, item by item, twice.

  Raises:
    AssertionError: anything but the one error came of it, or an array larger
      than its bytes could fill, or the decoder changed its mind.
  """
  try:
    items = decoder.Splitter().split(message)
  except errors.PoisonItemError as e:
    assert e.key is None
    return
  for whole_arrays in (False, True):
    reader = decoder.Decoder(whole_arrays=whole_arrays)
    for item in items:
      columns = _read_columns(reader, item)
      again = _read_columns(reader, item)
      assert (columns is None) == (again is None)
      for one, other in zip(columns or (), again or (), strict=True):
        assert isinstance(one, np.ndarray)
        assert one.nbytes <= 1024 * len(message)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype.hasobject:
          assert one.tolist() == other.tolist()
        else:
          assert one.tobytes() == other.tobytes()


def _read_columns(
  reader: decoder.Decoder, item: decoder.EncodedItem
) -> list[np.ndarray] | None:
  try:
    return reader.decode(item).columns
  except errors.PoisonItemError:
    return None
