"""No item of a checkpoint stays for good because the index lacks its entry."""

import pathlib
import struct
import threading
import time
import zlib

import numpy as np
import pytest
import sweeper_rig

from tunix_reverb import errors
from tunix_reverb.replay import checkpoint_items
from tunix_reverb.replay import checkpoints
from tunix_reverb.replay import clients
from tunix_reverb.replay import entries
from tunix_reverb.replay import sweeper as sweeper_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.staleness import bound as bound_lib

pytestmark = pytest.mark.slow

_BOUND = bound_lib.StalenessBound(max_policy_lag=2, max_age_s=1000.0)


def _record(payload: bytes) -> bytes:
  return struct.pack('<QI', len(payload), 0) + payload + bytes(4)


def _write(path: pathlib.Path, records, cut: int | None = None):
  packed = zlib.compress(b''.join(map(_record, records)))
  path.write_bytes(packed[:cut])


@pytest.mark.parametrize('sizes', [[], [0], [1, 0, 70_000], [3 << 20, 5]])
def test_records_come_whole_across_blocks(tmp_path, sizes):
  records = [np.random.default_rng(n).bytes(n) for n in sizes]
  _write(tmp_path / 'x', records)
  with open(tmp_path / 'x', 'rb') as file:
    assert list(checkpoint_items._records(file)) == records


def test_an_empty_file_holds_nothing(tmp_path):
  (tmp_path / 'x').touch()
  with open(tmp_path / 'x', 'rb') as file:
    assert list(checkpoint_items._records(file)) == []


@pytest.mark.parametrize('cut', [5, -1])
def test_a_cut_off_file_is_an_error(tmp_path, cut):
  _write(tmp_path / 'x', [bytes(100)] * 3, cut)
  with (
    open(tmp_path / 'x', 'rb') as file,
    pytest.raises(ValueError, match='is cut off'),
  ):
    list(checkpoint_items._records(file))


def test_a_half_record_is_an_error(tmp_path):
  (tmp_path / 'x').write_bytes(zlib.compress(_record(bytes(100))[:-5]))
  with (
    open(tmp_path / 'x', 'rb') as file,
    pytest.raises(ValueError, match='ends within a record'),
  ):
    list(checkpoint_items._records(file))


class _Run:
  """A server that is stopped after a checkpoint, and started again.

  Args:
    start: starts a server; called with its port, 0 first.
    closing: registers what to close.
  """

  def __init__(self, start, closing):
    self._start, self._closing = start, closing
    self._begin(0)

  def restart(self, stop):
    """Args: stop: ends the server; gets it."""
    stop(self.server)
    self._begin(self.server.port)

  def _begin(self, port):
    self.server = self._start(port)
    self.rig = self._closing(sweeper_rig.Rig(self.server.address))

  def restored_items(self):
    path = pathlib.Path(self.server.restored_from)
    return self._closing(
      checkpoint_items.CheckpointItems(
        checkpoints.data_directory(path), sweeper_rig.COLUMNS
      )
    )

  def sweeper(self, **kwargs):
    options = {'settle_s': 0.0, 'period_s': 20.0, **kwargs}
    return self._closing(
      sweeper_lib.Sweeper(self.rig.address, bound=_BOUND, **options)
    )


def _checkpoint_and_stop(server):
  server.checkpoint(20.0)
  server.stop(20.0)


def _checkpoint_and_kill(server):
  server.checkpoint()
  server.kill()


def _config(mode='replay'):
  return tables.TableConfig(mode=mode, balance='permits')


@pytest.fixture
def run(start_server, closing, tmp_path):
  return lambda mode='replay': _Run(
    lambda port: start_server(
      _config(mode), port=port, checkpoint_dir=tmp_path
    ),
    closing,
  )


def _trajectories(*versions, **kwargs):
  return [sweeper_rig.trajectory(v, **kwargs) for v in versions]


def _check_restored(served, stop, number):
  """Of `number` stale items and a few others, all that must stay, stays."""
  stale, fresh = _trajectories(*[1] * number), _trajectories(*[7] * 5)
  orphans = _trajectories(2, 7, length=5)
  served.rig.write(stale + fresh)
  served.rig.publish(1)
  served.sweeper().sweep()
  served.rig.write(orphans, index=False, announce=False)
  served.restart(stop)

  heir = served.sweeper(restored=served.restored_items())
  heir.sweep()
  assert heir.metrics()['sweep_entries'] == number + 7
  served.rig.publish(7)
  heir.sweep()
  assert served.rig.size(tables.TRAJECTORIES) == 6
  assert sorted(served.rig.removals()) == sorted(
    entries.Removal(o.key, o.entry.permit_id, o.entry.length, bound_lib.LAG)
    for o in [*stale, orphans[0]]
  )
  served.rig.publish(10)
  heir.sweep()
  assert served.rig.size(tables.TRAJECTORIES) == 0
  assert served.rig.size(tables.INDEX) == 0


@pytest.mark.replay
@pytest.mark.timeout(120)
@pytest.mark.parametrize('mode', ['queue', 'replay'])
@pytest.mark.parametrize('number', [10, 300])
def test_nothing_is_forgotten_and_nothing_fresh_is_lost(run, mode, number):
  _check_restored(run(mode), _checkpoint_and_stop, number)


@pytest.mark.replay
@pytest.mark.timeout(240)
def test_nor_by_a_killed_server(start_process, closing, tmp_path):
  served = _Run(
    lambda port: start_process(_config('queue'), port, tmp_path), closing
  )
  _check_restored(served, _checkpoint_and_kill, 300)


@pytest.mark.replay
@pytest.mark.timeout(120)
@pytest.mark.parametrize('number', [3, 300])
def test_the_next_checkpoint_has_them_indexed(run, number):
  served = run()
  served.rig.write(_trajectories(*[1] * number), index=False, announce=False)
  for _ in range(2):
    served.restart(_checkpoint_and_stop)
    known = served.sweeper(restored=served.restored_items())
    known.sweep()
    assert known.metrics()['sweep_entries'] == number
  # This time it was in the checkpoint.
  with_index = served.sweeper()
  with_index.sweep()
  assert with_index.metrics()['sweep_entries'] == number


@pytest.mark.replay
@pytest.mark.timeout(120)
def test_a_sweep_that_fails_amid_them_is_made_up_for(run, monkeypatch):
  served = run()
  served.rig.write(_trajectories(1, 1, 1), index=False, announce=False)
  served.restart(_checkpoint_and_stop)
  monkeypatch.setattr(sweeper_lib, '_ENTRIES_PER_ITEM', 1)
  sweeper = served.sweeper(restored=served.restored_items())
  inserts = iter([None, errors.DeadlineExceededError('x'), None, None])
  insert = sweeper._insert_into_index

  def fail_once(entries_):
    failure = next(inserts)
    if failure is not None:
      raise failure
    return insert(entries_)

  monkeypatch.setattr(sweeper, '_insert_into_index', fail_once)
  with pytest.raises(errors.DeadlineExceededError):
    sweeper.sweep()
  sweeper.sweep()
  assert sweeper.metrics()['sweep_entries'] == 3
  assert served.rig.size(tables.INDEX) == 3


@pytest.mark.replay
@pytest.mark.timeout(120)
@pytest.mark.parametrize('client', ['official', 'wire'])
def test_missing_entries_say_what_the_writer_would_have(run, closing, client):
  served = run()
  created_at_s = 1.25e9 + 0.5
  item = test_utils.item(lengths=(4,), policy_version=3)._replace(
    permit_id=np.array([-77]), policy_version=np.array([5, 3, 9, 4], np.int32)
  )
  writer = closing(
    clients.make_writer(
      served.rig.address, columns=sweeper_rig.COLUMNS, client=client
    ),
    5.0,
  )
  assert writer.write(item, 10.0)
  assert writer.close(10.0)
  served.restart(_checkpoint_and_stop)
  restored = served.restored_items()
  (entry,) = restored.missing_entries(set())
  assert entry[1:] == (3, created_at_s, -77, 4)
  assert served.rig.keys_left() == {entry.key}
  again = served.restored_items()
  assert again.missing_entries({entry.key}) == []


@pytest.mark.replay
@pytest.mark.timeout(120)
def test_an_unreadable_item_is_as_old_as_it_is_in_the_table(run, closing):
  served = run()
  inserter = closing(insert_stream.Inserter(served.rig.address))
  before_s = time.time()
  inserter.insert(
    [insert_stream.NewItem([(tables.TRAJECTORIES, 5, 4.0)], [np.zeros(3)])],
    10.0,
  )
  served.restart(_checkpoint_and_stop)
  (entry,) = served.restored_items().missing_entries(set())
  assert (entry.key, entry.policy_version) == (5, 4)
  assert before_s - 0.01 <= entry.created_at_s <= time.time()


class _CountingItems(checkpoint_items.CheckpointItems):
  """Knows how many entries it was asked for in vain."""

  num_missing = 0

  def missing_entries(self, known):
    missing = super().missing_entries(known)
    self.num_missing = len(missing)
    return missing


@pytest.mark.replay
@pytest.mark.timeout(240)
def test_checkpoints_amid_inserts_and_sweeps_lose_track_of_nothing(
  start_server, closing, tmp_path
):
  """What is inserted between index and trajectories is indexed nowhere.

  A server takes its tables in an order that is drawn when it starts. Here it
  takes the index first, and a large table between; ends with the first
  checkpoint in which an item has no entry.
  """
  for number in range(8):
    served = _Run(
      lambda port, number=number: start_server(
        _config(), port=port, checkpoint_dir=tmp_path / str(number)
      ),
      closing,
    )
    _restart_until_the_index_is_taken_first(served)
    served.rig.write(_trajectories(*[1000] * 100))
    for table in _LARGE:
      served.rig.fill(table, 20_000)
    _checkpoint_amid_writes(served)
    served.restart(lambda server: server.stop(20.0))
    assert served.rig.size(tables.TRAJECTORIES) >= 100
    restored = served.restored_items()
    restored.__class__ = _CountingItems
    heir = served.sweeper(restored=restored)
    heir.sweep()
    served.rig.publish(10**6)
    heir.sweep()
    assert served.rig.size(tables.TRAJECTORIES) == 0
    assert served.rig.size(tables.INDEX) == 0
    heir.close()
    if restored.num_missing:
      return
    served.server.stop(20.0)


_LARGE = (tables.PERMITS, tables.REMOVED)


def _restart_until_the_index_is_taken_first(served):
  """Within one process the order is one round, begun anywhere."""
  for _ in range(50):
    order = list(admin.info(served.rig.address, 10.0))
    between = order[
      order.index(tables.INDEX) : order.index(tables.TRAJECTORIES)
    ]
    if set(between) & set(_LARGE):
      return
    served.restart(lambda server: server.stop(20.0))
  pytest.skip('no server took the index, a large table and the trajectories')


def _checkpoint_amid_writes(served):
  """Three write, one sweeps every 20 ms, and versions go on."""
  stop = threading.Event()
  sweeper = served.sweeper(period_s=0.02)
  writers = [
    threading.Thread(target=_write_and_publish, args=(served.rig, n, stop))
    for n in range(3)
  ]
  sweeper.sweep()
  sweeper.start()
  for writer in writers:
    writer.start()
  try:
    deadline_s = time.monotonic() + 20.0
    while not sweeper.metrics()['swept_lag_total']:
      assert time.monotonic() < deadline_s
      time.sleep(0.01)
    served.server.checkpoint(20.0)
  finally:
    stop.set()
    for writer in writers:
      writer.join(10.0)
    sweeper.close()


def _write_and_publish(served, number, stop):
  rig = sweeper_rig.Rig(served.address)
  version = 1
  while not stop.is_set():
    rig.write(_trajectories(*[version] * 5))
    version += 1
    if not number:
      rig.publish(version)
  rig.close()
