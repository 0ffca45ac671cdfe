"""Pulling a few items by a deadline: none is lost, none is taken in vain."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.replay.wire_client import sample_stream

pytestmark = pytest.mark.timeout(180)

_TABLE = tables.TRAJECTORIES


@pytest.fixture
def server(serve):
  return serve(tables.TableConfig(max_items=5000))


@pytest.fixture
def puller(server, closing):
  return closing(sample_stream.Puller(server.address, _TABLE))


@pytest.fixture
def insert(server, closing):
  inserter = closing(insert_stream.Inserter(server.address))

  def insert_all(keys, **kwargs):
    inserter.insert(
      [
        insert_stream.NewItem(
          [(kwargs.get('table', _TABLE), key, kwargs.get('priority', 1.0))],
          [np.array(key, np.uint64), np.arange(3, dtype=np.float32)],
        )
        for key in keys
      ],
      30.0,
    )

  return insert_all


def _size(server) -> int:
  return admin.limiter_state(server.address, 5.0)[_TABLE].current_size


def _keys(items) -> list[int]:
  assert all(int(item.columns[0]) == item.key for item in items)
  return [item.key for item in items]


def test_an_item_comes_with_its_facts(server, puller, insert):
  start_s = time.time()
  insert([2**64 - 1], priority=3.5)
  (item,) = puller.pull(1, 20.0)
  assert (item.key, item.table, item.priority) == (2**64 - 1, _TABLE, 3.5)
  assert (item.times_sampled, item.table_size) == (1, 1)
  assert item.probability == 1.0
  assert start_s - 1.0 <= item.inserted_at_s <= time.time() + 1.0
  np.testing.assert_array_equal(item.columns[0], np.uint64(2**64 - 1))
  assert item.columns[0].shape == ()
  np.testing.assert_array_equal(item.columns[1], np.arange(3, dtype='f'))


@pytest.mark.parametrize('count', [1, 2, 64, 65, 700])
def test_exactly_so_many_are_taken(server, puller, insert, count):
  insert(range(1000))
  assert _keys(puller.pull(count, 20.0)) == list(range(count))
  assert _size(server) == 1000 - count
  assert _keys(puller.pull(3, 20.0)) == list(range(count, count + 3))


def test_what_is_there_comes_though_it_is_less(server, puller, insert):
  insert(range(10))
  start_s = time.monotonic()
  assert _keys(puller.pull(50, 0.3)) == list(range(10))
  assert 0.3 <= time.monotonic() - start_s < 2.5
  assert puller.pull(50, 0.0) == []


def test_nothing_is_taken_for_one_who_no_longer_waits(server, puller, insert):
  start_s = time.monotonic()
  assert puller.pull(8, 0.2) == []
  assert 0.2 <= time.monotonic() - start_s < 2.0
  insert([1, 2])
  assert _size(server) == 2
  assert _keys(puller.pull(2, 20.0)) == [1, 2]


def test_no_item_is_lost_though_every_pull_times_out(server, puller, insert):
  """Items come at any moment, that of the timeout included."""
  rng = np.random.default_rng(0)
  inserted = 300
  done = threading.Event()

  def insert_slowly():
    for key in range(inserted):
      insert([key])
      time.sleep(rng.exponential(0.005))
    done.set()

  threading.Thread(target=insert_slowly, daemon=True).start()
  received, pulls = [], 0
  while not done.is_set() or _size(server):
    received += _keys(puller.pull(1 + len(received) % 8, 0.01))
    pulls += 1
  assert received == list(range(inserted))
  assert pulls > 30


def test_several_pullers_share_a_table(server, closing, insert):
  insert(range(300))
  received = [[] for _ in range(4)]

  def pull(keys):
    puller = sample_stream.Puller(server.address, _TABLE)
    while items := puller.pull(7, 0.5):
      keys += _keys(items)
    puller.close()

  threads = [threading.Thread(target=pull, args=(keys,)) for keys in received]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60.0)
  assert sorted(k for keys in received for k in keys) == list(range(300))
  assert all(keys == sorted(keys) for keys in received)


def test_close_from_another_thread_ends_a_pull(server, puller):
  results = []
  thread = threading.Thread(target=lambda: results.append(puller.pull(1, 60.0)))
  thread.start()
  deadline_s = time.monotonic() + 20.0
  while puller._stream is None:
    assert time.monotonic() < deadline_s
    time.sleep(0.01)
  start_s = time.monotonic()
  puller.close()
  thread.join(10.0)
  assert results == [[]]
  assert time.monotonic() - start_s < 2.0
  assert puller.pull(1, 60.0) == []


def test_a_table_that_is_not_there(server, closing):
  puller = closing(sample_stream.Puller(server.address, 'nope'))
  with pytest.raises(errors.ReplayUnavailableError, match="table 'nope'"):
    puller.pull(1, 20.0)


def test_a_server_that_is_not_there(closing):
  puller = closing(sample_stream.Puller('localhost:1', _TABLE))
  start_s = time.monotonic()
  with pytest.raises(errors.ReplayUnavailableError, match='localhost:1'):
    puller.pull(1, 5.0)
  assert time.monotonic() - start_s < 8.0


def test_a_server_that_stands_still_and_one_that_restarts(
  start_process, closing
):
  server = start_process()
  puller = closing(sample_stream.Puller(server.address, _TABLE))
  assert puller.pull(1, 0.1) == []
  os.kill(server.pid, signal.SIGSTOP)
  try:
    start_s = time.monotonic()
    with pytest.raises(errors.ReplayUnavailableError, match='does not answer'):
      puller.pull(1, 0.2)
    assert time.monotonic() - start_s < 4.0
  finally:
    os.kill(server.pid, signal.SIGCONT)
  assert puller.pull(1, 1.0) == []
  server.kill()
  with pytest.raises(errors.ReplayUnavailableError):
    puller.pull(1, 5.0)
  start_process(port=server.port)
  deadline_s = time.monotonic() + 30.0
  while True:
    try:
      assert puller.pull(1, 0.1) == []
      return
    except errors.ReplayUnavailableError:
      assert time.monotonic() < deadline_s
      time.sleep(0.05)
