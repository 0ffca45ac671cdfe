"""The bytes that we assemble are those that protobuf would understand."""

import cramjam
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import ml_dtypes
import numpy as np
import pytest

from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import encoder as encoder_lib
from tunix_reverb.replay.wire_client import protocol

_KEYS = st.integers(0, 2**64 - 1)


def _parse(encoded):
  data = b''.join(encoded.parts)
  assert len(data) == encoded.num_bytes
  return protocol.InsertStreamRequest.FromString(data)


def _slowly(columns, entries, chunk_key, contents):
  """The request as protobuf builds it, with `contents` of the tensors."""
  chunk = protocol.ChunkData(chunk_key=chunk_key)
  chunk.sequence_range.episode_id = chunk_key
  chunk.data_tensors_len = len(columns)
  items = []
  for table, key, priority in entries:
    items.append(
      protocol.PrioritizedItem(key=key, table=table, priority=priority)
    )
  for i, (column, content) in enumerate(zip(columns, contents)):
    stored = codec.stored_dtype(column.dtype)
    strings = stored.hasobject
    tensor = chunk.data.tensors.add(
      dtype=codec.STRING if strings else codec.NUMBERS[stored],
      tensor_content=content,
    )
    for size in (1, *column.shape):
      tensor.tensor_shape.dim.add(size=size)
    chunk.data_uncompressed_size += 0 if strings else column.nbytes
    for item in items:
      item.flat_trajectory.columns.add().chunk_slices.add(
        chunk_key=chunk_key, length=1, index=i
      )
  return protocol.InsertStreamRequest(chunks=[chunk], items=items)


def _check(columns, entries, chunk_key, encoder=None):
  """Checks the request and returns it."""
  encoder = encoder or encoder_lib.Encoder()
  request = _parse(encoder.encode(columns, entries, chunk_key))
  contents = [t.tensor_content for t in request.chunks[0].data.tensors]
  assert request == _slowly(columns, entries, chunk_key, contents)
  for column, content in zip(columns, contents):
    if column.dtype.kind in 'OSU':
      assert content == codec.encode_strings(column.ravel().tolist())
    else:
      raw = bytes(cramjam.snappy.decompress_raw(content))
      native = column.astype(column.dtype.newbyteorder('='))
      assert raw == native.tobytes()
  return request


_ARRAYS = st.one_of(
  *(
    hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=5))
    for dtype in codec.NUMBERS
  )
)


@given(
  columns=st.lists(_ARRAYS, min_size=1, max_size=20),
  entries=st.lists(
    st.tuples(st.text(max_size=5), _KEYS, st.floats(0, allow_nan=False)),
    max_size=3,
  ),
  chunk_key=_KEYS,
)
def test_a_request_is_what_protobuf_would_build(columns, entries, chunk_key):
  _check(columns, entries, chunk_key)


@pytest.mark.parametrize('size', [0, 1, 60, 61, 256, 257, 4096, 65537, 2**24])
@pytest.mark.parametrize('shrinks', [False, True])
def test_columns_of_every_size(size, shrinks):
  column = np.zeros(size, np.uint8)
  if not shrinks:
    column = np.frombuffer(np.random.default_rng(0).bytes(size), np.uint8)
  encoder = encoder_lib.Encoder()
  for key in range(3):  # Not compressed once it was found not to shrink.
    request = _check([column], [('t', key, 1.0)], key, encoder)
    content = request.chunks[0].data.tensors[0].tensor_content
    assert (len(content) < 0.1 * size) == (shrinks and size >= 4096)


def test_a_column_that_starts_to_shrink_is_compressed_again():
  encoder = encoder_lib.Encoder()
  noise = np.random.default_rng(0).random(1000)
  sizes = [
    encoder.encode([column], [], 0).num_bytes
    for column in [noise] + 100 * [np.zeros(1000)]
  ]
  assert sizes[1] > 8000 and sizes[-1] < 1000


def test_items_follow_each_other_in_one_request():
  encoder = encoder_lib.Encoder()
  columns = [np.arange(3), np.float32(2.0)]
  parts = []
  for key in range(5):
    entries = [('a', key, 1.0), ('b', key, 2.0)]
    parts += encoder.encode(columns, entries, 2**63 + key).parts
  request = protocol.InsertStreamRequest.FromString(b''.join(parts))
  assert [chunk.chunk_key - 2**63 for chunk in request.chunks] == [*range(5)]
  assert [(i.table, i.key) for i in request.items] == [
    (table, key) for key in range(5) for table in 'ab'
  ]


@pytest.mark.parametrize(
  ('dtype', 'stored'),
  [
    (ml_dtypes.bfloat16, 'uint16'),
    (ml_dtypes.float8_e5m2, 'uint8'),
    (ml_dtypes.float8_e4m3fn, 'uint8'),
    ('>f8', 'float64'),
    ('>i4', 'int32'),
  ],
)
def test_other_dtypes_are_stored_as_one_that_everybody_reads(dtype, stored):
  column = np.arange(6).astype(dtype).reshape(2, 3)
  request = _check([column], [('t', 1, 1.0)], 1)
  (tensor,) = request.chunks[0].data.tensors
  assert tensor.dtype == codec.NUMBERS[np.dtype(stored)]


def test_arrays_of_any_memory_layout():
  array = np.arange(24, dtype=np.int16).reshape(4, 6)
  large = np.zeros((300, 200), np.float32)
  columns = [array.T, array[:, ::2], array[::-1], large.T, np.array(3)]
  _check(columns, [('t', 1, 1.0)], 1)


def test_strings():
  columns = [
    np.array([b'', b'abc', b'\0x'], object),
    np.array([['a', 'bcd'], ['é', '']]),
    np.array(b'scalar', object),
    np.zeros((0, 2), object),
    np.arange(3),
  ]
  _check(columns, [('t', 1, 1.0)], 1)


def test_what_cannot_be_stored_is_refused():
  encoder = encoder_lib.Encoder()
  with pytest.raises(TypeError, match='datetime64'):
    encoder.encode([np.zeros(2, 'M8[s]')], [], 1)
  with pytest.raises(ValueError, match='column'):
    encoder.encode([], [], 1)
  for priority in (-1.0, float('nan')):
    with pytest.raises(ValueError, match='priority'):
      encoder.encode([np.zeros(2)], [('t', 1, priority)], 1)
  array = np.broadcast_to(np.zeros(1, np.uint8), 2**31)
  with pytest.raises(ValueError, match='2 GiB'):
    encoder.encode([array], [], 1)


def test_varints_and_strings_come_back():
  for value in (0, 1, 127, 128, 2**32, 2**64 - 1):
    encoded = codec.varint(value)
    assert codec.read_varint(encoded + b'\1', 0) == (value, len(encoded))
  for strings in ([], [b''], [b'a' * 300, b'', b'b']):
    encoded = codec.encode_strings(strings)
    assert codec.decode_strings(encoded, len(strings)) == strings


@pytest.mark.parametrize(
  ('content', 'count'),
  [(b'', 1), (b'\1', 1), (b'\1ab', 1), (b'\xff' * 11, 1), (b'\1a', -1),
   (b'\1a', 2**62)],
)  # fmt: skip
def test_broken_strings_are_refused(content, count):
  with pytest.raises(ValueError):
    codec.decode_strings(content, count)


def test_raw_integers_are_viewed_as_the_expected_dtype():
  array = np.arange(4).astype(ml_dtypes.bfloat16)
  raw = array.view(codec.stored_dtype(array.dtype))
  assert raw.dtype == np.uint16
  viewed = codec.view_as(raw, array.dtype)
  assert viewed.dtype == array.dtype and (viewed == array).all()
  other = codec.view_as(np.zeros(3, np.uint8), np.dtype(np.float32))
  assert other.dtype == np.uint8
