"""`WireItemWriter` against real servers: keys, refusals, faults, blocking."""

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.replay import entries
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import sample_stream
from tunix_reverb.replay.wire_client import writer as writer_lib

pytestmark = pytest.mark.timeout(150)  # Two servers in turn, a busy machine.

_COLUMNS = test_utils.columns()
_SLACK_S = 2.0


@pytest.fixture
def new_writer(closing):
  def new(address, **kwargs):
    kwargs = {'columns': _COLUMNS, 'max_pending_items': 8, **kwargs}
    return closing(writer_lib.WireItemWriter(address, **kwargs), 0.0)

  return new


@pytest.fixture
def pull(closing):
  """Takes items out of a table, as (key, episode id) of each."""

  def pull_(address, count, table=tables.TRAJECTORIES):
    puller = closing(sample_stream.Puller(address, table))
    index = _episode_id_column()
    return [
      (item.key, int(item.columns[index][0]))
      for item in puller.pull(count, 20.0)
    ]

  return pull_


def _episode_id_column():
  from tunix_reverb.replay import columns

  return columns.ColumnCodec(_COLUMNS).paths.index('episode_id')


def _wait_until(condition):
  deadline_s = time.monotonic() + 40.0
  while not condition():
    assert time.monotonic() < deadline_s
    time.sleep(0.01)


def _write_all(writer, ids, timeout_s=40.0):
  """Writes one item per id; their keys by id."""
  keys = {}
  for i in ids:
    assert writer.write(test_utils.item(i), timeout_s)
    keys[i] = writer.last_key
  return keys


def test_keys_are_known_at_once_and_items_keep_their_order(
  serve, new_writer, pull
):
  server = serve(tables.TableConfig(max_items=200))
  writer = new_writer(server.address, max_pending_items=64)
  keys = _write_all(writer, range(150))
  assert len(set(keys.values())) == 150
  assert writer.close(10.0)
  assert writer.confirmed_items == 150 and writer.unconfirmed_items == 0
  assert pull(server.address, 150) == [(keys[i], i) for i in range(150)]


def test_items_of_many_shapes(serve, new_writer, closing):
  server = serve(tables.TableConfig(max_items=200))
  writer = new_writer(server.address)
  lengths = [(1,), (3, 4), (500,), (1, 1, 1), (4000,), (4, 3)]
  sent = [test_utils.item(i, lengths=n) for i, n in enumerate(lengths)]
  for item in sent:
    assert writer.write(item, 10.0)
  puller = closing(sample_stream.Puller(server.address, tables.TRAJECTORIES))
  codec = writer._encoder._codec
  for item, raw in zip(sent, puller.pull(len(sent), 10.0)):
    for ours, theirs in zip(codec.flatten(item), raw.columns):
      np.testing.assert_array_equal(theirs, ours, strict=True)


def test_bad_items_are_refused_before_they_are_sent(serve, new_writer, pull):
  server = serve()
  writer = new_writer(server.address)
  for _ in range(2):  # The second time, shapes are known.
    with pytest.raises(ValueError, match=r'policy_version \(-1\) must be >= 0'):
      writer.write(test_utils.item(policy_version=-1), 1.0)
    for lengths in ([4], [0], [3, 1]):
      bad = test_utils.item(lengths=(3,))
      bad = bad._replace(lengths=np.array(lengths, np.int32))
      with pytest.raises(ValueError, match='lengths'):
        writer.write(bad, 1.0)
    bad = test_utils.item(lengths=(1, 2))
    with pytest.raises(ValueError, match='lengths'):
      writer.write(bad._replace(lengths=np.array([0, 3], np.int32)), 1.0)
    with pytest.raises(errors.SpecMismatchError, match='column core_state/0'):
      writer.write(test_utils.item()._replace(core_state=()), 1.0)
    with pytest.raises(errors.SpecMismatchError, match=r'reward.*float64'):
      writer.write(test_utils.item()._replace(reward=np.zeros(3)), 1.0)
    assert writer.write(test_utils.item(5), 10.0)
    assert writer.write(test_utils.item(6, lengths=(1, 2)), 10.0)
  assert [i for _, i in pull(server.address, 4)] == [5, 6, 5, 6]


def test_what_the_server_does_not_serve_is_named(serve, new_writer):
  server = serve()
  theirs = test_utils.columns(observation_size=5)
  for writer, match in (
    (new_writer(server.address, table='other'), r'other.*trajectories'),
    (new_writer(server.address, announce=True), r'index.*trajectories'),
    (new_writer(server.address, columns=theirs), 'observation/position'),
  ):
    size = 5 if match.startswith('observation') else 3
    item = test_utils.item(observation_size=size)
    with pytest.raises(errors.SpecMismatchError, match=match):
      for _ in range(100):
        writer.write(item, 5.0)
    assert not writer.close(1.0)


def test_nobody_there_fails_for_good_and_close_keeps_its_deadline(new_writer):
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    address = f'localhost:{probe.getsockname()[1]}'
    writer = new_writer(address, max_pending_items=2, unavailable_timeout_s=0.5)
    with pytest.raises(errors.ReplayUnavailableError, match=address):
      for _ in range(5):
        writer.write(test_utils.item(), 5.0)
    assert writer.unconfirmed_items == 2
    start_s = time.monotonic()
    assert not writer.close(0.3)
    assert time.monotonic() - start_s < 0.3 + _SLACK_S
  with pytest.raises(RuntimeError, match='after close'):
    writer.write(test_utils.item(), 0.1)


def test_items_are_announced_under_their_keys(serve, new_writer, closing):
  server = serve(tables.TableConfig(balance=tables.PERMIT_BALANCE))
  writer = new_writer(server.address, announce=True)
  expected = {}
  for i in range(20):
    # Every other one is of a group, under its first one's permit.
    lengths = (i + 1, 1) if i % 2 else (i + 1,)
    item = test_utils.item(i, lengths=lengths, policy_version=i)
    permit_id = np.zeros(len(lengths), np.int64)
    permit_id[0] = 100 + i
    item = item._replace(permit_id=permit_id)
    assert writer.write(item, 10.0)
    expected[writer.last_key] = entries.Entry(
      writer.last_key, i, item.created_at_s[0], 100 + i, i + 1
    )
  two = test_utils.item(lengths=(1, 2))._replace(permit_id=np.array([7, 8]))
  with pytest.raises(ValueError, match='must be one, of the first'):
    writer.write(two, 1.0)
  assert writer.close(10.0) and writer.confirmed_items == 20
  infos = admin.info(server.address, 10.0)
  for table in (tables.TRAJECTORIES, tables.INDEX, tables.ANNOUNCEMENTS):
    assert infos[table].current_size == 20
  for table in (tables.INDEX, tables.ANNOUNCEMENTS):
    puller = closing(sample_stream.Puller(server.address, table))
    for raw in puller.pull(20, 10.0):
      assert entries.decode_entries(raw.columns) == [expected[raw.key]]
      assert raw.priority == expected[raw.key].policy_version
      if table == tables.ANNOUNCEMENTS:
        del expected[raw.key]
  assert not expected


def test_nothing_is_lost_and_nothing_twice_after_a_kill(
  start_process, new_writer, pull, tmp_path
):
  config = tables.TableConfig(max_items=64)
  server = start_process(config, directory=tmp_path)
  writer = new_writer(server.address, max_pending_items=32)
  keys = _write_all(writer, range(10))
  _wait_until(lambda: not writer.unconfirmed_items)
  server.checkpoint()
  # Confirmed and not in the checkpoint; then taken over while nobody serves.
  keys |= _write_all(writer, range(10, 15))
  _wait_until(lambda: not writer.unconfirmed_items)
  server.kill()
  keys |= _write_all(writer, range(15, 20), 1.0)
  restarted = start_process(config, port=server.port, directory=tmp_path)
  assert writer.close(40.0)
  info = admin.info(restarted.address, 10.0)[tables.TRAJECTORIES]
  received = pull(restarted.address, info.current_size)
  assert len(set(received)) == len(received)
  safe = [*range(10), *range(15, 20)]
  assert {(keys[i], i) for i in safe} <= set(received)


def test_what_a_stopping_server_confirmed_without_storing_is_sent_again(
  start_process, new_writer, pull, tmp_path
):
  server = start_process(tables.TableConfig(max_items=2), directory=tmp_path)
  writer = new_writer(server.address, max_pending_items=4)
  keys, written = {}, 0
  while writer.write(test_utils.item(written), 1.5):
    keys[written] = writer.last_key
    written += 1
  confirmed = writer.confirmed_items
  assert confirmed < written
  server.checkpoint()
  assert server.wait() == 0  # Stops; confirms what was waiting for room.
  restarted = start_process(
    tables.TableConfig(max_items=2), port=server.port, directory=tmp_path
  )
  assert restarted.restored_from
  received = pull(restarted.address, written)
  assert received == [(keys[i], i) for i in range(written)]
  assert writer.close(10.0)


@pytest.mark.parametrize('by', ['limiter', 'network'])
def test_blocked_time_is_told_apart(start_process, new_writer, by):
  server = start_process(tables.TableConfig(max_items=2))
  writer = new_writer(server.address, max_pending_items=2)
  if by == 'limiter':
    while writer.write(test_utils.item(), 0.3):
      pass
  else:
    server.kill()
    for _ in range(2):
      assert writer.write(test_utils.item(), 0.0)
  before_s = writer.blocked_s()
  blamed = getattr(writer, f'blocked_by_{by}_s')
  start_s = time.monotonic()
  assert not writer.write(test_utils.item(), 2.5)
  waited_s = time.monotonic() - start_s
  assert writer.blocked_s() - before_s == pytest.approx(waited_s, abs=0.3)
  _wait_until(lambda: blamed() > 0.8 * writer.blocked_s() > 1.5)
  both_s = writer.blocked_by_limiter_s() + writer.blocked_by_network_s()
  assert both_s <= writer.blocked_s() + 1e-6


def test_a_silent_server_is_waited_for_and_loses_nothing(
  start_process, new_writer, pull
):
  server = start_process(tables.TableConfig(max_items=16))
  writer = new_writer(server.address, unavailable_timeout_s=2.0)
  keys = _write_all(writer, range(2))
  _wait_until(lambda: not writer.unconfirmed_items)
  os.kill(server.pid, signal.SIGSTOP)
  try:
    keys |= _write_all(writer, range(2, 5))
    assert not _closed_in_time(new_writer(server.address))
    with pytest.raises(errors.ReplayUnavailableError, match='has not answered'):
      while True:
        writer.write(test_utils.item(99), 1.0)
  finally:
    os.kill(server.pid, signal.SIGCONT)
  received = [r for r in pull(server.address, 10) if r[0] in keys.values()]
  assert received == [(keys[i], i) for i in range(5)]


def _closed_in_time(writer):
  """Closes a writer that waits for the server; whether all was confirmed."""
  assert writer.write(test_utils.item(), 1.0)
  start_s = time.monotonic()
  confirmed = writer.close(0.5)
  assert time.monotonic() - start_s < 0.5 + _SLACK_S
  return confirmed


class _Proxy:
  """Forwards connections to a server, until some of them are frozen."""

  def __init__(self, address):
    self._target = address.split(':')
    self._listener = socket.create_server(('127.0.0.1', 0))
    self.address = f'127.0.0.1:{self._listener.getsockname()[1]}'
    self._sockets = []
    self._frozen = set()
    threading.Thread(target=self._accept, daemon=True).start()

  def freeze(self):
    """Nothing passes any more on the connections there are; none breaks."""
    self._frozen.update(self._sockets)

  def close(self):
    for one in (self._listener, *self._sockets):
      one.close()

  def _accept(self):
    while True:
      try:
        client, _ = self._listener.accept()
      except OSError:
        return
      server = socket.create_connection(self._target)
      self._sockets += client, server
      for source, sink in ((client, server), (server, client)):
        threading.Thread(
          target=self._pump, args=(source, sink), daemon=True
        ).start()

  def _pump(self, source, sink):
    try:
      while data := source.recv(65536):
        if source not in self._frozen:
          sink.sendall(data)
    except OSError:
      pass
    if source not in self._frozen:
      sink.close()


def test_a_connection_that_died_in_silence_is_replaced(
  serve, new_writer, pull, closing, monkeypatch
):
  monkeypatch.setattr(writer_lib, '_STALLED_S', 1.0)
  server = serve(tables.TableConfig(max_items=16))
  proxy = closing(_Proxy(server.address))
  writer = new_writer(proxy.address)
  keys = _write_all(writer, range(2))
  _wait_until(lambda: not writer.unconfirmed_items)
  proxy.freeze()
  keys |= _write_all(writer, range(2, 4))
  _wait_until(lambda: not writer.unconfirmed_items)
  assert pull(server.address, 4) == [(keys[i], i) for i in range(4)]
  assert writer.resent_items == 2


def test_several_threads_write(serve, new_writer, pull):
  server = serve(tables.TableConfig(max_items=200))
  writer = new_writer(server.address)
  threads = [
    threading.Thread(
      target=lambda i=i: [
        writer.write(test_utils.item(100 * i + k), 20.0) for k in range(20)
      ]
    )
    for i in range(4)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(40.0)
  assert writer.close(10.0)
  received = [i for _, i in pull(server.address, 80)]
  assert sorted(received) == [100 * i + k for i in range(4) for k in range(20)]
