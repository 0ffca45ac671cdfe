"""Limiters, evictions and shards of real servers, as each client meets them."""

import socket
import threading
import time

import pytest

from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

pytestmark = pytest.mark.timeout(60)

_ALL_OPEN = 1000.0  # A tolerance under which no limiter ever blocks.


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def _write_all(writer, items):
  for item in items:
    assert writer.write(item, 10.0)


def _confirmed(writer, num_items):
  deadline_s = time.monotonic() + 10.0
  while writer.confirmed_items < num_items:
    assert time.monotonic() < deadline_s, writer.confirmed_items
    time.sleep(0.005)


def _state(server, client) -> tables.LimiterState:
  states = clients.limiter_state(server.address, 5.0, client=client)
  return states[tables.TRAJECTORIES]


def test_queue_holds_max_items_and_hands_out_each_once(
  serve, make_writer, make_sampler, client
):
  server = serve(tables.TableConfig(max_items=4))
  writer = make_writer(server.address)
  _write_all(writer, [test_utils.item(i) for i in range(4)])
  _confirmed(writer, 4)
  state = _state(server, client)
  assert (state.current_size, state.max_size) == (4, 4)
  assert not state.can_insert and state.can_sample

  sent = 4
  while writer.write(test_utils.item(sent), 0.3):
    sent += 1
  assert sent <= 4 + 2 + 2  # The writer's queue, and what the server takes in.

  sampler = make_sampler(server.address)
  ids = []
  while (sampled := sampler.sample(0.5)) is not None:
    assert sampled.times_sampled == 1
    ids.append(int(sampled.trajectories.episode_id[0]))
  assert ids == list(range(sent))
  state = _state(server, client)
  assert state.inserts_completed == state.samples_completed == sent
  assert state.current_size == 0
  assert state.can_insert and not state.can_sample
  assert state.inserts_blocked_s > 0.2


def test_items_are_visible_soon_after_write(serve, make_writer, make_sampler):
  server = serve()
  writer = make_writer(server.address)
  sampler = make_sampler(server.address)
  _write_all(writer, [test_utils.item(0)])
  sampler.sample(10.0)
  delays_s = []
  for i in range(5):
    start_s = time.monotonic()
    _write_all(writer, [test_utils.item(i)])
    assert sampler.sample(5.0) is not None
    delays_s.append(time.monotonic() - start_s)
  assert min(delays_s) < 0.05, delays_s


def test_replay_mode_keeps_its_ratio(serve, make_writer, make_sampler, client):
  config = tables.TableConfig(
    mode='replay',
    max_items=8,
    min_items=2,
    samples_per_insert=2.0,
    samples_per_insert_tolerance=0.25,
  )
  server = serve(config)
  description = clients.describe(server.address, 5.0, client=client)[
    tables.TRAJECTORIES
  ]
  assert (description.min_diff, description.max_diff) == (0.0, 8.0)
  writer = make_writer(server.address)
  sampler = make_sampler(server.address)
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
  state = _state(server, client)
  error = state.inserts_completed * 2.0 - state.samples_completed
  assert 0.0 <= error <= 8.0
  assert state.samples_completed >= 100


def test_replay_mode_hands_out_nothing_below_min_items(
  serve, make_writer, make_sampler
):
  config = tables.TableConfig(
    mode='replay',
    max_items=8,
    min_items=3,
    samples_per_insert_tolerance=_ALL_OPEN,
  )
  server = serve(config)
  writer = make_writer(server.address)
  sampler = make_sampler(server.address)
  _write_all(writer, [test_utils.item(i) for i in range(2)])
  assert sampler.sample(0.3) is None
  _write_all(writer, [test_utils.item(2)])
  assert sampler.sample(10.0) is not None


@pytest.mark.parametrize('sampler_name', ['uniform', 'prioritised'])
def test_a_full_table_evicts_the_oldest_policy(
  serve, sampler_name, make_writer, make_sampler
):
  config = tables.TableConfig(
    mode='replay',
    sampler=sampler_name,
    max_items=4,
    samples_per_insert_tolerance=_ALL_OPEN,
  )
  server = serve(config)
  writer = make_writer(server.address)
  versions = [5, 1, 7, 3, 9, 8]
  _write_all(writer, [test_utils.item(policy_version=v) for v in versions])
  _confirmed(writer, len(versions))
  sampler = make_sampler(server.address)
  seen = {int(sampler.sample(10.0).priority) for _ in range(200)}
  assert seen == {5, 7, 8, 9}


def test_shards_are_merged_fairly_and_completely(
  serve, make_writer, make_sampler, client
):
  servers = [serve(tables.TableConfig(max_items=16)) for _ in range(2)]
  for shard, server in enumerate(servers):
    writer = make_writer(server.address)
    _write_all(writer, [test_utils.item(100 * shard + i) for i in range(10)])
    _confirmed(writer, 10)
  sampler = make_sampler(*(s.address for s in servers))
  deadline_s = time.monotonic() + 10.0
  while any(_state(server, client).samples_completed < 2 for server in servers):
    assert time.monotonic() < deadline_s
  ids = [
    int(sampler.sample(10.0).trajectories.episode_id[0]) for _ in range(20)
  ]
  assert sorted(ids) == [*range(10), *range(100, 110)]
  first, second = [i for i in ids if i < 100], [i for i in ids if i >= 100]
  assert first == sorted(first) and second == sorted(second)
  assert 2 <= sum(i < 100 for i in ids[:10]) <= 8, ids


def test_a_dead_shard_does_not_stop_the_others(
  serve, make_writer, make_sampler
):
  server = serve()
  dead = f'localhost:{_free_port()}'
  sampler = make_sampler(dead, server.address)
  writer = make_writer(server.address)
  _write_all(writer, [test_utils.item(i) for i in range(4)])
  assert all(sampler.sample(10.0) is not None for _ in range(4))
  silent_s = sampler.silent_s()
  assert silent_s[dead] > silent_s[server.address]
