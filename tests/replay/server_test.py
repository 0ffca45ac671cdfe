"""Tables, limiters, shards and refusals, on real servers in this process."""

import socket
import threading
import time

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

pytestmark = [pytest.mark.replay, pytest.mark.timeout(60)]

_COLUMNS = test_utils.columns()
_ALL_OPEN = 1000.0  # A tolerance under which no limiter ever blocks.


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def _writer(server, closing):
  return closing(clients.make_writer(server.address, columns=_COLUMNS), 0.0)


def _sampler(servers, closing, **kwargs):
  return closing(
    clients.make_sampler(
      [server.address for server in servers], columns=_COLUMNS, **kwargs
    )
  )


def _write_all(writer, items):
  for item in items:
    assert writer.write(item, 10.0)


def _confirmed(writer, num_items):
  deadline_s = time.monotonic() + 10.0
  while writer.confirmed_items < num_items:
    assert time.monotonic() < deadline_s, writer.confirmed_items
    time.sleep(0.005)


def _state(server) -> tables.LimiterState:
  return clients.limiter_state(server.address, 5.0)[tables.TRAJECTORIES]


def test_queue_holds_max_items_and_hands_out_each_once(start_server, closing):
  server = start_server(tables.TableConfig(max_items=4))
  writer = _writer(server, closing)
  _write_all(writer, [test_utils.item(i) for i in range(4)])
  _confirmed(writer, 4)
  state = _state(server)
  assert (state.current_size, state.max_size) == (4, 4)
  assert not state.can_insert and state.can_sample

  sent = 4
  while writer.write(test_utils.item(sent), 0.3):
    sent += 1
  assert sent <= 4 + 2 + 2  # The writer's queue, and what the server takes in.

  sampler = _sampler([server], closing)
  ids = []
  while (sampled := sampler.sample(0.5)) is not None:
    assert sampled.times_sampled == 1
    ids.append(int(sampled.trajectories.episode_id[0]))
  assert ids == list(range(sent))
  state = _state(server)
  assert state.inserts_completed == state.samples_completed == sent
  assert state.current_size == 0
  assert state.can_insert and not state.can_sample
  assert state.inserts_blocked_s > 0.2


def test_items_are_visible_soon_after_write(start_server, closing):
  server = start_server()
  writer = _writer(server, closing)
  sampler = _sampler([server], closing)
  _write_all(writer, [test_utils.item(0)])
  sampler.sample(10.0)
  delays_s = []
  for i in range(5):
    start_s = time.monotonic()
    _write_all(writer, [test_utils.item(i)])
    assert sampler.sample(5.0) is not None
    delays_s.append(time.monotonic() - start_s)
  assert min(delays_s) < 0.05, delays_s


def test_replay_mode_keeps_its_ratio(start_server, closing):
  config = tables.TableConfig(
    mode='replay',
    max_items=8,
    min_items=2,
    samples_per_insert=2.0,
    samples_per_insert_tolerance=0.25,
  )
  server = start_server(config)
  description = clients.describe(server.address, 5.0)[tables.TRAJECTORIES]
  assert (description.min_diff, description.max_diff) == (0.0, 8.0)
  writer = _writer(server, closing)
  sampler = _sampler([server], closing)
  stop = threading.Event()

  def write():
    i = 0
    while not stop.is_set():
      i += writer.write(test_utils.item(i), 0.1)

  thread = threading.Thread(target=write)
  thread.start()
  try:
    times_sampled = [sampler.sample(10.0).times_sampled for _ in range(100)]
  finally:
    stop.set()
    thread.join()
  assert max(times_sampled) > 1
  state = _state(server)
  error = state.inserts_completed * 2.0 - state.samples_completed
  assert 0.0 <= error <= 8.0
  assert state.samples_completed >= 100


def test_replay_mode_hands_out_nothing_below_min_items(start_server, closing):
  config = tables.TableConfig(
    mode='replay',
    max_items=8,
    min_items=3,
    samples_per_insert_tolerance=_ALL_OPEN,
  )
  server = start_server(config)
  writer = _writer(server, closing)
  sampler = _sampler([server], closing)
  _write_all(writer, [test_utils.item(i) for i in range(2)])
  assert sampler.sample(0.3) is None
  _write_all(writer, [test_utils.item(2)])
  assert sampler.sample(10.0) is not None


@pytest.mark.parametrize('sampler_name', ['uniform', 'prioritised'])
def test_a_full_table_evicts_the_oldest_policy(
  start_server, closing, sampler_name
):
  config = tables.TableConfig(
    mode='replay',
    sampler=sampler_name,
    max_items=4,
    samples_per_insert_tolerance=_ALL_OPEN,
  )
  server = start_server(config)
  writer = _writer(server, closing)
  versions = [5, 1, 7, 3, 9, 8]
  _write_all(writer, [test_utils.item(policy_version=v) for v in versions])
  _confirmed(writer, len(versions))
  sampler = _sampler([server], closing)
  seen = {int(sampler.sample(10.0).priority) for _ in range(200)}
  assert seen == {5, 7, 8, 9}


def test_shards_are_merged_fairly_and_completely(start_server, closing):
  servers = [start_server(tables.TableConfig(max_items=16)) for _ in range(2)]
  for shard, server in enumerate(servers):
    writer = _writer(server, closing)
    _write_all(writer, [test_utils.item(100 * shard + i) for i in range(10)])
    _confirmed(writer, 10)
  sampler = _sampler(servers, closing)
  deadline_s = time.monotonic() + 10.0
  while any(_state(server).samples_completed < 2 for server in servers):
    assert time.monotonic() < deadline_s
  ids = [
    int(sampler.sample(10.0).trajectories.episode_id[0]) for _ in range(20)
  ]
  assert sorted(ids) == [*range(10), *range(100, 110)]
  first, second = [i for i in ids if i < 100], [i for i in ids if i >= 100]
  assert first == sorted(first) and second == sorted(second)
  assert 2 <= sum(i < 100 for i in ids[:10]) <= 8, ids


def test_a_dead_shard_does_not_stop_the_others(start_server, closing):
  server = start_server()
  dead = f'localhost:{_free_port()}'
  sampler = closing(
    clients.make_sampler([dead, server.address], columns=_COLUMNS)
  )
  writer = _writer(server, closing)
  _write_all(writer, [test_utils.item(i) for i in range(4)])
  assert all(sampler.sample(10.0) is not None for _ in range(4))
  silent_s = sampler.silent_s()
  assert silent_s[dead] > silent_s[server.address]


def test_a_port_in_use_is_refused(start_server):
  server = start_server()
  with pytest.raises(errors.UserError, match=rf'port \({server.port}\).*free'):
    start_server(port=server.port)
  with socket.socket() as other:
    other.bind(('127.0.0.1', 0))
    other.listen()
    port = other.getsockname()[1]
    with pytest.raises(errors.UserError, match=rf'port \({port}\)'):
      start_server(port=port)


def test_a_port_can_be_served_again_at_once(start_server, closing):
  server = start_server()
  writer = _writer(server, closing)
  _write_all(writer, [test_utils.item()])
  _confirmed(writer, 1)
  server.stop(20.0)
  assert start_server(port=server.port).port == server.port


def test_check_signature_lists_every_difference(start_server):
  server = start_server(tables.TableConfig(max_items=4))
  clients.check_signature(
    server.address, _COLUMNS, tables.TableConfig(max_items=4), 5.0
  )
  ours = _COLUMNS._replace(
    action=specs.ColumnSpec((None, 2), np.float32), core_state=()
  )
  with pytest.raises(errors.SpecMismatchError) as raised:
    clients.check_signature(
      server.address, ours, tables.TableConfig(max_items=8), 5.0
    )
  message = str(raised.value)
  assert 'max_table_items: this run has 8, the server has 4' in message
  assert 'column action: this run has float32[?, 2]' in message
  assert 'the server has uint8[?]' in message
  assert 'column core_state/0: this run has no such column' in message
  assert 'reward' not in message


def test_nobody_at_the_address_is_told_by_the_deadline():
  address = f'localhost:{_free_port()}'
  start_s = time.monotonic()
  with pytest.raises(errors.ReplayUnavailableError, match=address):
    clients.wait_for_server(address, 0.5)
  with pytest.raises(errors.ReplayUnavailableError, match=address):
    clients.describe(address, 0.5)
  stop = threading.Event()
  stop.set()
  assert not clients.wait_for_server(address, 60.0, stop)
  assert time.monotonic() - start_s < 5.0


def test_clients_fail_for_good_when_nobody_answers(closing):
  address = f'localhost:{_free_port()}'
  kwargs = {'columns': _COLUMNS, 'unavailable_timeout_s': 0.5}
  writer = closing(clients.make_writer(address, **kwargs), 0.0)
  sampler = closing(clients.make_sampler([address], **kwargs))
  source = closing(
    clients.make_variable_source(address, unavailable_timeout_s=0.5)
  )
  for call in (
    lambda: [writer.write(test_utils.item(), 5.0) for _ in range(5)],
    lambda: sampler.sample(5.0),
    lambda: source.get_variables(1, 5.0),
  ):
    with pytest.raises(errors.ReplayUnavailableError, match=address):
      call()
  assert writer.unconfirmed_items == 2


def test_a_writer_of_other_columns_is_refused(start_server, closing):
  server = start_server()
  theirs = test_utils.columns(observation_size=5)
  writer = closing(clients.make_writer(server.address, columns=theirs), 0.0)
  assert writer.write(test_utils.item(observation_size=5), 5.0)
  with pytest.raises(errors.SpecMismatchError, match='observation/position'):
    while True:
      writer.write(test_utils.item(observation_size=5), 5.0)


def test_bad_items_are_refused_before_they_are_sent(start_server, closing):
  writer = _writer(start_server(), closing)
  with pytest.raises(ValueError, match=r'policy_version \(-1\) must be >= 0'):
    writer.write(test_utils.item(policy_version=-1), 1.0)
  bad = test_utils.item(lengths=(3,))._replace(lengths=np.array([4], np.int32))
  with pytest.raises(ValueError, match='lengths'):
    writer.write(bad, 1.0)
  with pytest.raises(errors.SpecMismatchError, match='column core_state/0'):
    writer.write(test_utils.item()._replace(core_state=()), 1.0)


def test_poison_items_are_counted_and_skipped(start_server, closing):
  """Items that pass the table's signature and contradict themselves."""
  server = start_server(tables.TableConfig(max_items=16))
  sampler = _sampler([server], closing)
  import reverb

  client = reverb.Client(server.address)
  poison = [
    test_utils.item()._replace(lengths=np.array(lengths, np.int32))
    for lengths in ([4], [], [0, 3], [-1, 4], [2, 2])
  ]
  for item in poison:
    client.insert(specs.flatten_columns(item), {tables.TRAJECTORIES: 1.0})
  _write_all(_writer(server, closing), [test_utils.item(42)])
  assert sampler.sample(10.0).trajectories.episode_id[0] == 42
  assert sampler.poison_items == len(poison)
  assert sampler.broken_streams == 0


@pytest.mark.parametrize(
  'columns',
  [
    test_utils.columns(observation_size=5),
    _COLUMNS._replace(core_state=()),
    _COLUMNS._replace(reward=specs.ColumnSpec((None,), np.float64)),
  ],
  ids=['shape', 'count', 'dtype'],
)
def test_items_of_other_columns_are_poison(start_server, closing, columns):
  server = start_server()
  _write_all(_writer(server, closing), [test_utils.item(i) for i in range(3)])
  sampler = closing(clients.make_sampler([server.address], columns=columns))
  deadline_s = time.monotonic() + 10.0
  while sampler.poison_items < 3 and time.monotonic() < deadline_s:
    assert sampler.sample(0.02) is None
  assert sampler.poison_items == 3


def test_large_variables_go_through_a_file(start_server, closing, tmp_path):
  server = start_server()
  foreign = tmp_path / 'variables' / 'mine.bin'
  foreign.parent.mkdir()
  foreign.write_text('keep')
  sink = closing(
    clients.make_variable_sink(
      server.address, run_dir=tmp_path, inline_bytes=1000
    )
  )
  source = closing(clients.make_variable_source(server.address, period_s=0.01))
  for version in range(1, 6):
    params = {'w': np.full(1000, version, np.float32)}
    sink.publish(types.Variables(version, params), 10.0)
    received = source.get_variables(version, 10.0)
    test_utils.assert_trees_equal(received.params, params)
  assert len(list(foreign.parent.glob('variables-*.bin'))) == 2
  assert foreign.read_text() == 'keep'


def test_thirty_megabytes_of_variables(start_server, closing):
  server = start_server()
  sink = closing(clients.make_variable_sink(server.address))
  source = closing(clients.make_variable_source(server.address, period_s=0.01))
  params = {'w': np.random.default_rng(0).random(30 << 18, dtype=np.float32)}
  start_s = time.monotonic()
  sink.publish(types.Variables(1, params), 20.0)
  received = source.get_variables(1, 20.0)
  assert time.monotonic() - start_s < 10.0
  test_utils.assert_trees_equal(received.params, params)


def test_publishing_to_nobody_ends_by_its_deadline_and_heals(
  start_server, closing
):
  port = _free_port()
  sink = closing(clients.make_variable_sink(f'localhost:{port}'))
  start_s = time.monotonic()
  with pytest.raises(errors.DeadlineExceededError, match=str(port)):
    sink.publish(types.Variables(1, {'w': np.ones(3)}), 0.5)
  assert time.monotonic() - start_s < 2.5
  server = start_server(port=port)
  source = closing(clients.make_variable_source(server.address))
  assert source.get_variables(1, 30.0).policy_version == 1
  sink.publish(types.Variables(2, {'w': np.ones(3)}), 10.0)
  with pytest.raises(ValueError, match='must be above'):
    sink.publish(types.Variables(2, {'w': np.ones(3)}), 10.0)


def test_a_new_learner_may_begin_with_older_versions(start_server, closing):
  server = start_server()
  source = closing(clients.make_variable_source(server.address, period_s=0.01))
  before = closing(clients.make_variable_sink(server.address))
  before.publish(types.Variables(9, {}), 10.0)
  assert source.get_variables(9, 10.0) is not None
  resumed = closing(clients.make_variable_sink(server.address))
  resumed.publish(types.Variables(4, {}), 10.0)
  deadline_s = time.monotonic() + 10.0
  while source.get_variables().policy_version != 4:
    assert time.monotonic() < deadline_s
    time.sleep(0.01)


def test_variables_lost_with_a_server_are_published_again(
  start_server, closing
):
  server = start_server()
  sink = closing(clients.make_variable_sink(server.address))
  sink.publish(types.Variables(3, {'w': np.ones(3)}), 10.0)
  server.stop(20.0)
  server = start_server(port=server.port)
  source = closing(clients.make_variable_source(server.address))
  assert source.get_variables(3, 30.0).policy_version == 3
