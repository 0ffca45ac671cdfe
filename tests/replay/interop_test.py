"""Each client reads what the other wrote, bit for bit."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb.replay import client_names
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils
from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import decoder as decoder_lib
from tunix_reverb.replay.wire_client import sample_stream

pytestmark = [pytest.mark.replay, pytest.mark.timeout(120)]

_WIRE, _OFFICIAL = client_names.WIRE, client_names.OFFICIAL
_PAIRS = list(itertools.product(client_names.CLIENTS, repeat=2))
_pairs = pytest.mark.parametrize('pair', _PAIRS, ids='-'.join)


def _columns(observation, core_state=()):
  """`ColumnSpec`s of an agent with these observations and core state."""
  return test_utils.columns()._replace(
    observation=observation, core_state=core_state
  )


def _column(dtype, *shape: int) -> specs.ColumnSpec:
  return specs.ColumnSpec((None, *shape), np.dtype(dtype))


def _random(rng, rows: int, spec: specs.ColumnSpec) -> np.ndarray:
  """Any bits: NaNs, infinities and denormals among them."""
  shape = (rows, *spec.shape[1:])
  if spec.dtype == bool:
    return rng.integers(2, size=shape).astype(bool)
  size = int(np.prod(shape)) * spec.dtype.itemsize
  return np.frombuffer(rng.bytes(size), spec.dtype).reshape(shape)


def _item(columns, episode_id: int, lengths=(3,)):
  """An item that fits `columns`, told apart by its `episode_id`."""
  rng = np.random.default_rng(episode_id)
  rows = sum(lengths) + len(lengths)
  return test_utils.item(episode_id, lengths=lengths)._replace(
    observation={
      name: _random(rng, rows, spec)
      for name, spec in columns.observation.items()
    },
    core_state=tuple(
      _random(rng, len(lengths), spec) for spec in columns.core_state
    ),
  )


def _exchange(server, closing, pair, columns, items, read_columns=None):
  """Writes with one client and reads with the other; the items that came."""
  writer = closing(
    clients.make_writer(server.address, columns=columns, client=pair[0]), 0.0
  )
  sampler = closing(
    clients.make_sampler(
      [server.address], columns=read_columns or columns, client=pair[1]
    )
  )
  received = []
  for item in items:
    assert writer.write(item, 30.0)
    sampled = sampler.sample(30.0)
    assert sampled is not None, sampler.poison_items
    received.append(sampled.trajectories)
  assert writer.close(10.0)
  return received


def _assert_exchanged(server, closing, pair, columns, items):
  received = _exchange(server, closing, pair, columns, items)
  for ours, theirs in zip(received, items, strict=True):
    test_utils.assert_items_equal(ours, theirs)


@_pairs
def test_every_dtype_and_empty_arrays(start_server, closing, pair):
  observation = {
    dtype.name: _column(dtype, 2, 3) for dtype in codec.NUMBERS
  } | {
    'empty': _column('float32', 0, 3),
    'flat': _column('uint8'),
    'deep': _column('int16', 1, 2, 1, 2),
  }
  columns = _columns(
    observation, (_column('float32', 0), _column('float64', 2))
  )
  items = [
    _item(columns, i, lengths)
    for i, lengths in enumerate([(1,), (5,), (2, 1, 4), (60,) * 20])
  ]
  _assert_exchanged(
    start_server(columns=columns), closing, pair, columns, items
  )


@_pairs
def test_an_item_larger_than_a_message_of_grpc_may_be(
  start_server, closing, pair
):
  columns = _columns({'image': _column('uint8', 64, 64, 3)})
  items = [_item(columns, 0, lengths=(2000,))]  # 25 MB; the default is 4.
  _assert_exchanged(
    start_server(columns=columns), closing, pair, columns, items
  )


@_pairs
def test_many_trajectories_in_an_item(start_server, closing, pair):
  columns = _columns({'x': _column('float32', 4)}, (_column('float32', 8),))
  lengths = tuple(np.random.default_rng(0).integers(1, 30, 3000).tolist())
  items = [_item(columns, 1, lengths)]
  _assert_exchanged(
    start_server(columns=columns), closing, pair, columns, items
  )


@_pairs
def test_what_shrinks_comes_back_as_well(start_server, closing, pair):
  columns = _columns({'x': _column('int64', 50), 'y': _column('bool', 500)})
  items = []
  for i, value in enumerate([0, 1, 0]):
    item = _item(columns, i, (100,))
    items.append(
      item._replace(
        observation={
          name: np.full_like(array, value)
          for name, array in item.observation.items()
        }
      )
    )
  _assert_exchanged(
    start_server(columns=columns), closing, pair, columns, items
  )


@pytest.mark.parametrize('writer', client_names.CLIENTS)
@pytest.mark.parametrize(
  ('dtype', 'stored'),
  [
    (ml_dtypes.bfloat16, 'uint16'),
    (ml_dtypes.float8_e5m2, 'uint8'),
    (ml_dtypes.float8_e4m3fn, 'uint8'),
  ],
)
def test_dtypes_that_numpy_lacks_travel_as_raw_integers(
  start_server, closing, writer, dtype, stored
):
  """The wire client says what they mean; for the official one they are bits."""
  meant = _columns({'x': _column(dtype, 3)}, (_column(dtype, 2),))
  raw = _columns({'x': _column(stored, 3)}, (_column(stored, 2),))
  written_as = meant if writer == _WIRE else raw
  items = [_item(written_as, i, (4, 2)) for i in range(2)]
  for reader, read_as in ((_OFFICIAL, raw), (_WIRE, meant), (_WIRE, raw)):
    server = start_server(columns=raw)
    received = _exchange(
      server, closing, (writer, reader), written_as, items, read_as
    )
    for ours, theirs in zip(received, items, strict=True):
      assert ours.observation['x'].dtype == read_as.observation['x'].dtype
      assert ours.core_state[0].dtype == read_as.core_state[0].dtype
      as_raw = lambda array: array.view(stored)
      test_utils.assert_items_equal(
        ours._replace(
          observation={'x': as_raw(ours.observation['x'])},
          core_state=(as_raw(ours.core_state[0]),),
        ),
        theirs._replace(
          observation={'x': as_raw(theirs.observation['x'])},
          core_state=(as_raw(theirs.core_state[0]),),
        ),
      )


def _stepwise(client):
  """Columns of different histories, one of them a single squeezed step."""
  with client.trajectory_writer(num_keep_alive_refs=20) as writer:
    for i in range(17):
      writer.append(
        {
          'x': np.arange(6, dtype=np.int32).reshape(2, 3) * i,
          'y': np.float64(i),
          's': f'step {i}',
        }
      )
    writer.create_item(
      'foreign',
      1.0,
      {
        'all': writer.history['x'][:],
        'last': writer.history['x'][-1],
        'middle': writer.history['y'][-9:-2],
        'text': writer.history['s'][-3:],
      },
    )
    writer.flush()


def _delta_encoded(client):
  """Integers as differences, over several chunks and from the middle of one."""
  rng = np.random.default_rng(0)
  with client.writer(
    max_sequence_length=9, delta_encoded=True, chunk_length=4
  ) as writer:
    for _ in range(10):
      writer.append(
        [
          rng.integers(-(2**31), 2**31, (2, 3), np.int32),
          rng.integers(0, 2**8, (3,), np.uint8),
          rng.random(4),
          np.int64(5),
        ]
      )
    writer.create_item('foreign', 7, 1.0)


def _inserted(client):
  client.insert(
    [np.float32(1.5), np.zeros((0, 3), np.uint8), [b'bytes', b''], 'text'],
    {'foreign': 1.0},
  )


@pytest.mark.parametrize('write', [_stepwise, _delta_encoded, _inserted])
def test_whatever_the_official_client_writes_is_read_alike(write):
  import reverb

  server = reverb.Server(
    [
      reverb.Table(
        name='foreign',
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=1,
        rate_limiter=reverb.rate_limiters.MinSize(1),
      )
    ]
  )
  try:
    address = f'localhost:{server.port}'
    write(reverb.Client(address))
    sampler = reverb.pybind.Client(address).NewSampler('foreign', 1, 1)
    num_facts = reverb.pybind.Sampler.NUM_INFO_TENSORS
    theirs = sampler.GetNextTrajectory()[num_facts:]
    ours = _sample_over_the_wire(address)
  finally:
    server.stop()
  assert len(ours) == len(theirs) > 0
  for a, b in zip(ours, theirs):
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype == object:
      assert a.tolist() == b.tolist()
    else:
      assert a.tobytes() == b.tobytes()


def _sample_over_the_wire(address: str) -> list[np.ndarray]:
  with connection.open_channel(address) as channel:
    stream = sample_stream.SampleStream(channel, 'foreign')
    stream.request(1, 10.0)
    items = []
    while not items:
      items = stream.read()
    stream.cancel()
  return decoder_lib.Decoder(whole_arrays=False).decode(items[0]).columns


@_pairs
def test_an_item_sampled_often_tells_how_often(start_server, closing, pair):
  config = tables.TableConfig(
    mode='replay', max_items=2, samples_per_insert_tolerance=1e6
  )
  server = start_server(config)
  item = test_utils.item(1, policy_version=6)
  writer = closing(
    clients.make_writer(
      server.address, columns=test_utils.columns(), client=pair[0]
    ),
    0.0,
  )
  assert writer.write(item, 10.0)
  sampler = closing(
    clients.make_sampler(
      [server.address], columns=test_utils.columns(), client=pair[1]
    )
  )
  samples = [sampler.sample(10.0) for _ in range(5)]
  assert [sampled.times_sampled for sampled in samples] == [1, 2, 3, 4, 5]
  assert len({sampled.key for sampled in samples}) == 1
  assert {sampled.priority for sampled in samples} == {6.0}
