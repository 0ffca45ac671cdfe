"""The sampler's window, restarts and ends; its contract is elsewhere."""

import os
import signal
import threading
import time

import pytest

from tunix_reverb import errors
from tunix_reverb.replay import client_names
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils
from tunix_reverb.replay.wire_client import sampler as sampler_lib
from tunix_reverb.replay.wire_client import shard as shard_lib

pytestmark = pytest.mark.timeout(180)

_COLUMNS = test_utils.columns()


def _write(server, ids) -> None:
  writer = clients.make_writer(
    server.address, columns=_COLUMNS, client=client_names.WIRE
  )
  for i in ids:
    assert writer.write(test_utils.item(i), 20.0)
  assert writer.close(20.0)


def _sampler(closing, servers, **kwargs) -> sampler_lib.WireItemSampler:
  return closing(
    sampler_lib.WireItemSampler(
      [server.address for server in servers], columns=_COLUMNS, **kwargs
    )
  )


def _id(item) -> int:
  return int(item.trajectories.episode_id[0])


def _take(sampler, count: int) -> list[int]:
  items = [sampler.sample(40.0) for _ in range(count)]
  assert None not in items
  return [_id(item) for item in items]


def _size(server) -> int:
  states = clients.limiter_state(server.address, 5.0, client=client_names.WIRE)
  return states[tables.TRAJECTORIES].current_size


def _wait_for(condition) -> None:
  deadline_s = time.monotonic() + 30.0
  while not condition():
    assert time.monotonic() < deadline_s
    time.sleep(0.01)


@pytest.mark.parametrize('window', [1, 2, 5])
def test_no_more_than_the_window_is_out_of_the_table(serve, closing, window):
  server = serve(tables.TableConfig(max_items=64))
  _write(server, range(30))
  sampler = _sampler(closing, [server], max_in_flight=window)
  _wait_for(lambda: _size(server) == 30 - window)
  for i in range(30):
    assert _take(sampler, 1) == [i]
    assert _size(server) >= 30 - window - (i + 1)
  assert len(sampler.close()) == 0


def test_what_the_window_held_comes_back_at_the_end(serve, closing):
  server = serve(tables.TableConfig(max_items=64))
  _write(server, range(10))
  sampler = _sampler(closing, [server], max_in_flight=4)
  _wait_for(lambda: _size(server) == 6)
  assert _take(sampler, 1) == [0]
  _wait_for(lambda: len(sampler._shards[0]._items) == 3)
  assert [_id(item) for item in sampler.close()] == [1, 2, 3]
  # The rest is there for the next one.
  assert _take(_sampler(closing, [server]), 6) == list(range(4, 10))


def test_servers_take_turns(serve, closing):
  servers = [serve(tables.TableConfig(max_items=64)) for _ in range(3)]
  for i, server in enumerate(servers):
    _write(server, range(100 * i, 100 * i + 10))
  sampler = _sampler(closing, servers, max_in_flight=2)
  for shard in sampler._shards:
    _wait_for(lambda shard=shard: len(shard._items) == 2)
  assert sorted(i // 100 for i in _take(sampler, 3)) == [0, 1, 2]
  ids = _take(sampler, 27)
  for i in range(3):
    of_server = [x for x in ids if x // 100 == i]
    assert of_server == list(range(100 * i + 1, 100 * i + 10))


def test_many_threads_share_a_sampler(serve, closing):
  server = serve(tables.TableConfig(max_items=300))
  _write(server, range(200))
  sampler = _sampler(closing, [server], max_in_flight=16)
  taken = [[] for _ in range(4)]
  threads = [
    threading.Thread(target=lambda ids=ids: ids.extend(_take(sampler, 50)))
    for ids in taken
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60.0)
  assert sorted(i for ids in taken for i in ids) == list(range(200))
  assert all(ids == sorted(ids) for ids in taken)


def test_an_item_tells_when_it_was_inserted(serve, closing):
  server = serve()
  start_s = time.time()
  _write(server, [1])
  item = _sampler(closing, [server]).sample(20.0)
  assert start_s - 1.0 <= item.inserted_at_s <= time.time() + 1.0


def test_close_from_another_thread_ends_a_wait_and_the_threads(serve, closing):
  server = serve()
  sampler = _sampler(closing, [server])
  results = []
  waiting = threading.Thread(target=lambda: results.append(sampler.sample(60)))
  waiting.start()
  _wait_for(lambda: sampler._shards[0]._owed)
  start_s = time.monotonic()
  assert sampler.close() == []
  waiting.join(10.0)
  assert results == [None]
  assert time.monotonic() - start_s < 2.0
  name = f'sampler of {server.address}'
  _wait_for(lambda: name not in [t.name for t in threading.enumerate()])
  assert sampler.sample(0.0) is None


def test_an_empty_table_renews_the_stream_and_nothing_is_lost(
  serve, closing, monkeypatch
):
  monkeypatch.setattr(shard_lib, '_REQUEST_TIMEOUT_S', 0.02)
  server = serve(tables.TableConfig(max_items=64))
  sampler = _sampler(closing, [server], max_in_flight=8)
  (shard,) = sampler._shards
  streams = set()
  for i in range(40):
    # Nothing has come for longer than a request may wait.
    _wait_for(lambda: shard._idle and shard._owed)
    streams.add(shard._stream)
    _write(server, [i])
    assert _take(sampler, 1) == [i]
  assert len(streams) == 40
  assert sampler.broken_streams == 0


def test_a_sampler_that_is_gone_is_served_only_for_a_while(
  serve, closing, monkeypatch
):
  monkeypatch.setattr(shard_lib, '_REQUEST_TIMEOUT_S', 0.2)
  server = serve(tables.TableConfig(max_items=64))
  sampler = _sampler(closing, [server], max_in_flight=4)
  _wait_for(lambda: sampler._shards[0]._owed)
  sampler.close()
  time.sleep(0.5)  # Its last request times out.
  _write(server, range(5))
  assert _size(server) == 5


def test_what_was_sampled_before_a_restart_does_not_come_again(
  start_process, closing, tmp_path
):
  config = tables.TableConfig(max_items=16)
  server = start_process(config, directory=tmp_path)
  _write(server, range(10))
  server.checkpoint()
  sampler = _sampler(closing, [server], max_in_flight=3)
  assert _take(sampler, 4) == [0, 1, 2, 3]
  _wait_for(lambda: len(sampler._shards[0]._items) >= 2)
  server.kill()
  _wait_for(lambda: sampler.broken_streams)
  start_process(config, port=server.port, directory=tmp_path)
  # All ten come again, and with them what was received and not returned.
  assert _take(sampler, 6) == [4, 5, 6, 7, 8, 9]
  assert sampler.sample(0.3) is None
  assert 6 <= sampler.duplicate_items <= 7


def test_where_items_are_sampled_often_they_come_again(
  start_process, closing, tmp_path
):
  config = tables.TableConfig(
    mode='replay', max_items=16, samples_per_insert_tolerance=1e6
  )
  server = start_process(config, directory=tmp_path)
  _write(server, [7])
  server.checkpoint()
  sampler = _sampler(closing, [server])
  assert _take(sampler, 20) == [7] * 20
  server.kill()
  _wait_for(lambda: sampler.broken_streams)
  start_process(config, port=server.port, directory=tmp_path)
  assert _take(sampler, 20) == [7] * 20
  assert sampler.duplicate_items == 0


def test_a_server_that_stands_still_goes_on(start_process, closing):
  server = start_process(tables.TableConfig(max_items=16))
  sampler = _sampler(closing, [server])
  _write(server, [0])
  assert _take(sampler, 1) == [0]
  os.kill(server.pid, signal.SIGSTOP)
  try:
    start_s = time.monotonic()
    assert sampler.sample(0.3) is None
    assert 0.3 <= time.monotonic() - start_s < 2.0
    _wait_for(lambda: sampler.silent_s()[server.address] > 1.5)
  finally:
    os.kill(server.pid, signal.SIGCONT)
  _write(server, [1])
  assert _take(sampler, 1) == [1]
  assert sampler.silent_s()[server.address] < 1.5
  assert sampler.broken_streams == 0


def test_a_stream_that_is_dead_without_a_word_is_replaced(
  start_process, closing, monkeypatch
):
  monkeypatch.setattr(shard_lib, '_STALLED_S', 0.5)
  server = start_process(tables.TableConfig(max_items=16))
  sampler = _sampler(closing, [server], max_in_flight=1)
  _wait_for(lambda: sampler._shards[0]._owed)
  os.kill(server.pid, signal.SIGSTOP)
  try:
    deadline_s = time.monotonic() + 20.0
    while not sampler.broken_streams:
      assert time.monotonic() < deadline_s
      assert sampler.sample(0.1) is None
  finally:
    os.kill(server.pid, signal.SIGCONT)
  # What the first stream had asked for goes to it, though it is gone.
  _write(server, [0, 1])
  assert _take(sampler, 1)[0] <= 1


def test_servers_that_are_all_gone_are_an_error(start_process, closing):
  servers = [start_process() for _ in range(2)]
  sampler = _sampler(closing, servers, unavailable_timeout_s=1.0)
  servers[0].kill()
  _write(servers[1], [0])
  assert _take(sampler, 1) == [0]
  servers[1].kill()
  with pytest.raises(errors.ReplayUnavailableError, match='no replay server'):
    sampler.sample(30.0)


@pytest.mark.parametrize(
  'kwargs', [{'max_in_flight': 0}, {'addresses': []}], ids=str
)
def test_wrong_arguments_are_refused(kwargs):
  addresses = kwargs.pop('addresses', ['localhost:1'])
  with pytest.raises(ValueError, match='must be >= 1'):
    sampler_lib.WireItemSampler(addresses, columns=_COLUMNS, **kwargs)
