"""Decoding: sound items, and all poison that is known or can be drawn."""

import pathlib

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import decoder as decoder_lib
from tunix_reverb.replay.wire_client import protocol
from tunix_reverb.replay.wire_client import test_utils

_KEY = 2**63 + 12345
_CHUNK_KEY = 0xFEDC_BA98_7654_3210

_NUMERIC = [dtype for dtype in codec.DTYPES.values() if not dtype.hasobject]


def _items(response, whole_arrays=True, dtypes=None) -> list:
  decoder = decoder_lib.Decoder(whole_arrays=whole_arrays, dtypes=dtypes)
  encoded = decoder_lib.Splitter().split(response.SerializeToString())
  return [decoder.decode(one) for one in encoded]


def _columns(arrays, columns=None, whole_arrays=True, **kwargs) -> list:
  """What comes out of one chunk of `arrays`."""
  chunk = test_utils.chunk(_CHUNK_KEY, arrays, **kwargs)
  if columns is None:
    item = test_utils.whole_item(_KEY, _CHUNK_KEY, len(arrays))
  else:
    item = test_utils.item(_KEY, columns)
  (raw,) = _items(test_utils.response([(item, [chunk])]), whole_arrays)
  return raw.columns


def _values(dtype: np.dtype, *shape: int) -> np.ndarray:
  """Distinct bytes, the extremes among them."""
  if dtype == np.bool_:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3 == 0
  size = int(np.prod(shape)) * dtype.itemsize
  data = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
  return data.view(dtype).reshape(shape)


def _assert_equal(actual: np.ndarray, expected: np.ndarray) -> None:
  assert isinstance(actual, np.ndarray)
  assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
  if expected.dtype == object:
    assert actual.tolist() == expected.tolist()
  else:
    assert actual.tobytes() == expected.tobytes()


def test_an_item_comes_with_its_facts():
  item = test_utils.whole_item(_KEY, _CHUNK_KEY, 1, table='t', priority=2.5)
  chunk = test_utils.chunk(_CHUNK_KEY, [np.zeros((1, 2), np.float32)])
  (raw,) = _items(test_utils.response([(item, [chunk])]))
  assert raw[:-1] == (_KEY, 't', 2.5, 1, 1_700_000_000.5, 3, 0.5)


def test_defaults_that_are_not_on_the_wire():
  item = test_utils.whole_item(0, 0, 1, table='', priority=0.0)
  chunk = test_utils.chunk(0, [np.zeros((1, 2), np.float32)])
  response = test_utils.response([(item, [chunk])])
  response.entries[0].info.ClearField('probability')
  response.entries[0].info.item.ClearField('inserted_at')
  response.entries[0].info.item.times_sampled = 0
  (raw,) = _items(response)
  assert raw[:-1] == (0, '', 0.0, 0, 0.0, 3, 0.0)
  _assert_equal(raw.columns[0], np.zeros(2, np.float32))


@pytest.mark.parametrize('dtype', _NUMERIC, ids=str)
@pytest.mark.parametrize('shape', [(), (5,), (3, 4), (0,), (3, 0, 2)], ids=str)
@pytest.mark.parametrize('delta_encoded', [False, True])
def test_every_dtype_and_shape(dtype, shape, delta_encoded):
  array = _values(dtype, 1, *shape)
  (column,) = _columns([array], delta_encoded=delta_encoded)
  _assert_equal(column, array.reshape(shape))


@pytest.mark.parametrize('shape', [(), (3,), (2, 2), (0,)], ids=str)
def test_strings(shape):
  strings = np.empty((1, *shape), object)
  for i in np.ndindex(strings.shape):
    strings[i] = bytes(i) * sum(i)
  (column,) = _columns([strings])
  _assert_equal(column, strings.reshape(shape))


def test_raw_integers_are_viewed_as_the_dtype_that_is_expected():
  arrays = [
    np.array([1.5, -0.25], ml_dtypes.bfloat16),
    np.array([0.5, 2.0, 8.0], ml_dtypes.float8_e4m3fn),
    np.array([1, 2], np.uint16),
  ]
  stored = [arrays[0].view(np.uint16), arrays[1].view(np.uint8), arrays[2]]
  chunk = test_utils.chunk(_CHUNK_KEY, [a[np.newaxis] for a in stored])
  item = test_utils.whole_item(_KEY, _CHUNK_KEY, 3)
  response = test_utils.response([(item, [chunk])])
  for actual, expected in zip(_items(response)[0].columns, stored):
    _assert_equal(actual, expected)
  (raw,) = _items(response, dtypes=[a.dtype for a in arrays])
  for actual, expected in zip(raw.columns, arrays):
    _assert_equal(actual, expected)


@pytest.mark.parametrize('dtype', ['int8', 'uint8', 'int32', 'uint64', 'bool'])
def test_delta_encoding_wraps_around_as_unsigned(dtype):
  array = _values(np.dtype(dtype), 6, 3)
  columns = [([(_CHUNK_KEY, 1, 4, 0)], False)]
  (column,) = _columns([array], columns, whole_arrays=False, delta_encoded=True)
  _assert_equal(column, array[1:5])


def test_slices_of_several_chunks_are_laid_end_to_end():
  a = np.arange(12, dtype=np.int32).reshape(4, 3)
  b = 100 + np.arange(9, dtype=np.int32).reshape(3, 3)
  other = np.arange(4, dtype=np.float64)
  chunks = [
    test_utils.chunk(1, [other, a], delta_encoded=True),
    test_utils.chunk(2, [b]),
  ]
  item = test_utils.item(
    _KEY,
    [
      ([(1, 2, 2, 1), (2, 0, 2, 0)], False),
      ([(2, 2, 1, 0)], True),
      ([(1, 3, 1, 0)], True),
      ([(1, 0, 4, 0)], False),
      ([(1, 0, 0, 1)], False),
    ],
  )
  expected = [
    np.concatenate([a[2:], b[:2]]),
    b[2],
    other[3:].reshape(()),
    other,
    a[:0],
  ]
  for chunks_per_entry in (1, 2):
    response = test_utils.response(
      [(item, chunks)], chunks_per_entry=chunks_per_entry
    )
    assert len(response.entries) == 3 - chunks_per_entry
    (raw,) = _items(response, whole_arrays=False)
    for actual, wanted in zip(raw.columns, expected, strict=True):
      _assert_equal(actual, wanted)


def test_an_item_spread_over_several_responses():
  arrays = [np.full((2, 3), i, np.int16) for i in range(5)]
  chunks = [test_utils.chunk(10 + i, [a]) for i, a in enumerate(arrays)]
  item = test_utils.item(_KEY, [([(10 + i, 0, 2, 0) for i in range(5)], False)])
  after = test_utils.whole_item(7, 10, 1)
  response = test_utils.response(
    [(item, chunks), (after, [test_utils.chunk(10, [arrays[0][:1]])])],
    chunks_per_entry=2,
  )
  splitter, decoder = (
    decoder_lib.Splitter(),
    decoder_lib.Decoder(whole_arrays=False),
  )
  decoded = []
  for entry in response.entries:
    message = protocol.SampleStreamResponse(entries=[entry])
    decoded += map(decoder.decode, splitter.split(message.SerializeToString()))
  assert [raw.key for raw in decoded] == [_KEY, 7]
  _assert_equal(decoded[0].columns[0], np.concatenate(arrays))
  _assert_equal(decoded[1].columns[0], arrays[0][:1])


def test_items_that_share_headers_and_differ_in_all_else():
  """What a decoder remembers of one item is not taken for the next."""
  decoder = decoder_lib.Decoder()
  splitter = decoder_lib.Splitter()
  for i, (rows, swapped) in enumerate(
    [(3, False), (3, True), (4, False), (3, False)]
  ):
    arrays = [
      np.full((1, rows, 2), i, np.float32),
      np.full((1, rows), -i, np.int64),
    ]
    chunk_key = _CHUNK_KEY + i
    order = [1, 0] if swapped else [0, 1]
    item = test_utils.item(
      i, [([(chunk_key, 0, 1, index)], False) for index in order]
    )
    response = test_utils.response(
      [(item, [test_utils.chunk(chunk_key, arrays)])]
    )
    (encoded,) = splitter.split(response.SerializeToString())
    raw = decoder.decode(encoded)
    assert raw.key == i
    for actual, index in zip(raw.columns, order, strict=True):
      _assert_equal(actual, arrays[index][0])


def test_columns_can_be_written_to():
  (column,) = _columns([np.zeros((1, 4), np.float32)])
  column += 1
  assert column.flags.aligned


@pytest.mark.parametrize(
  'squeeze, whole_arrays', [(True, False), (False, True)]
)
def test_squeezing_more_than_one_timestep_is_poison(squeeze, whole_arrays):
  columns = [([(_CHUNK_KEY, 0, 2, 0)], squeeze)]
  with pytest.raises(errors.PoisonItemError, match='column 0: its 2 timesteps'):
    _columns([np.zeros((2, 3))], columns, whole_arrays)


def test_a_whole_array_that_is_one_row_of_several():
  array = np.arange(6).reshape(3, 2)
  for offset in (0, 2):
    columns = [([(_CHUNK_KEY, offset, 1, 0)], False)]
    (column,) = _columns([array], columns, delta_encoded=True)
    _assert_equal(column, array[offset])


def _poisoned(kind: str):
  good = np.random.default_rng(1).standard_normal((1, 4)).astype(np.float32)
  chunk = test_utils.chunk(_CHUNK_KEY, [good, good])
  item = test_utils.whole_item(_KEY, _CHUNK_KEY, 2)
  test_utils.poison(kind, chunk, item)
  return item, [chunk]


@pytest.mark.parametrize('whole_arrays', [False, True])
@pytest.mark.parametrize('kind', test_utils.POISON)
def test_poison_costs_its_item_alone(kind, whole_arrays):
  chunk = test_utils.chunk(1, [np.arange(4)[np.newaxis]])
  sound = test_utils.whole_item(1, 1, 1), [chunk]
  response = test_utils.response([sound, _poisoned(kind), sound])
  decoder = decoder_lib.Decoder(whole_arrays=whole_arrays)
  encoded = decoder_lib.Splitter().split(response.SerializeToString())
  decoder.decode(encoded[0])
  with pytest.raises(errors.PoisonItemError) as caught:
    decoder.decode(encoded[1])
  assert caught.value.key == _KEY
  assert f"item {_KEY} of table 'trajectories'" in str(caught.value)
  assert 'column 0: ' in str(caught.value) or kind == 'no tensors'
  _assert_equal(decoder.decode(encoded[2]).columns[0].reshape(4), np.arange(4))


@pytest.mark.parametrize(
  'columns, match',
  [
    ([], 'no columns'),
    ([([], False)], 'column 0: it has no slices'),
    ([([(5, 0, 1, 0)], False)], 'column 0: chunk 5 is missing'),
    (
      [([(_CHUNK_KEY, 0, 1, 0), (_CHUNK_KEY, 0, 1, 1)], False)],
      'column 0: its slices must agree',
    ),
    (
      # 4 MB stored in few bytes, over and over.
      [([(_CHUNK_KEY, 0, 1, 2)] * 20_000, False)],
      'column 0: its slices join to',
    ),
  ],
)
def test_a_trajectory_that_contradicts_its_chunks(columns, match):
  arrays = [
    np.zeros((1, 4), np.float32),
    np.zeros((1, 5), np.float32),
    np.zeros((1, 1_000_000), np.float32),
  ]
  with pytest.raises(errors.PoisonItemError, match=match) as caught:
    _columns(arrays, columns, whole_arrays=False)
  assert caught.value.key == _KEY


def test_chunks_that_do_not_come():
  item, _ = _poisoned('no dtype')
  for chunks in ([], [test_utils.chunk(5, [np.zeros((1, 2))])]):
    with pytest.raises(errors.PoisonItemError) as caught:
      _items(test_utils.response([(item, chunks)]))
    assert caught.value.key == _KEY


def test_garbage_is_one_error():
  for garbage in (b'\xff', b'\x0a\x05', b'\x0b', b'\x0a' + b'\xff' * 11):
    with pytest.raises(errors.PoisonItemError) as caught:
      decoder_lib.Splitter().split(garbage)
    assert caught.value.key is None


# Fuzzing: sound items of any make come out as they went in, and whatever is
# done to their bytes has no other effect than an item or the one error.


@st.composite
def _arrays(draw, rows):
  dtype = draw(st.sampled_from([*_NUMERIC, np.dtype(object)]))
  shape = (rows, *draw(st.lists(st.integers(0, 4), max_size=3)))
  seed = draw(st.integers(0, 9))
  rng = np.random.default_rng(seed)
  if dtype.hasobject:
    array = np.empty(shape, object)
    for i in np.ndindex(shape):
      array[i] = rng.bytes(seed)
    return array
  if dtype == np.bool_:
    return rng.random(shape) < 0.5
  size = int(np.prod(shape)) * dtype.itemsize
  high = draw(st.sampled_from([2, 256]))  # Compressible, or not.
  data = rng.integers(0, high, size).astype(np.uint8)
  return data.view(dtype).reshape(shape)


@st.composite
def _samples(draw):
  """(item, chunks, expected columns)."""
  tables = draw(st.integers(1, 3))
  rows = draw(st.integers(1, 4))
  base = draw(st.sampled_from([0, 1, 300, _CHUNK_KEY]))
  arrays = [draw(_arrays(rows)) for _ in range(tables)]
  num_chunks = draw(st.integers(1, 3))
  chunks = [
    test_utils.chunk(base + i, arrays, delta_encoded=draw(st.booleans()))
    for i in range(num_chunks)
  ]
  columns, expected = [], []
  for _ in range(draw(st.integers(1, 3))):
    index = draw(st.integers(0, tables - 1))
    slices, parts = [], []
    for _ in range(draw(st.integers(1, 3))):
      start = draw(st.integers(0, rows))
      length = draw(st.integers(0, rows - start))
      which = draw(st.integers(0, num_chunks - 1))
      slices.append((base + which, start, length, index))
      parts.append(arrays[index][start : start + length])
    joined = np.concatenate(parts)
    squeeze = len(joined) == 1 and draw(st.booleans())
    columns.append((slices, squeeze))
    expected.append(joined.reshape(joined.shape[1:]) if squeeze else joined)
  key = draw(st.integers(0, 2**64 - 1))
  return test_utils.item(key, columns), chunks, expected


@settings(max_examples=60, deadline=None)
@given(st.lists(_samples(), min_size=1, max_size=3), st.integers(1, 3))
def test_any_sound_item_comes_out_as_it_went_in(samples, chunks_per_entry):
  response = test_utils.response(
    [(item, chunks) for item, chunks, _ in samples],
    chunks_per_entry=chunks_per_entry,
  )
  decoded = _items(response, whole_arrays=False)
  for raw, (item, _, expected) in zip(decoded, samples, strict=True):
    assert raw.key == item.key
    for actual, wanted in zip(raw.columns, expected, strict=True):
      _assert_equal(actual, wanted)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(_arrays(1), min_size=1, max_size=4), min_size=1))
def test_any_whole_arrays_come_out_as_they_went_in(items):
  samples = []
  for i, arrays in enumerate(items):
    item = test_utils.whole_item(i, _CHUNK_KEY + i, len(arrays))
    samples.append((item, [test_utils.chunk(_CHUNK_KEY + i, arrays)]))
  # Twice: what was seen before is read in another way.
  decoded = _items(test_utils.response(2 * samples))
  for raw, arrays in zip(decoded, 2 * items, strict=True):
    for actual, wanted in zip(raw.columns, arrays, strict=True):
      _assert_equal(actual, wanted[0, ...])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_bytes_changed_at_will_do_no_harm(data):
  samples = data.draw(st.lists(_samples(), min_size=1, max_size=2))
  response = test_utils.response([(i, chunks) for i, chunks, _ in samples])
  message = bytearray(response.SerializeToString())
  for _ in range(data.draw(st.integers(1, 4))):
    at = data.draw(st.integers(0, len(message) - 1))
    cut = data.draw(st.integers(0, 3))
    message[at : at + cut] = data.draw(st.binary(max_size=3))
    if not message:
      break
  test_utils.read_anything(bytes(message))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_do_no_harm(message):
  test_utils.read_anything(message)


_CORPUS = pathlib.Path(__file__).parent / 'corpus'


def test_what_fuzzing_found_worth_keeping_does_no_harm():
  """The corpus that `fuzz_decoder.py` has gathered."""
  paths = sorted(_CORPUS.iterdir())
  assert paths
  for path in paths:
    test_utils.read_anything(path.read_bytes())
