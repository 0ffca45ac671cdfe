"""What is too old leaves the table, whatever happens to the sweeper."""

import itertools
import threading
import time

import numpy as np
import pytest
import sweeper_rig

from tunix_reverb import errors
from tunix_reverb.agents import builder
from tunix_reverb.agents import config as config_lib
from tunix_reverb.replay import clients
from tunix_reverb.replay import entries
from tunix_reverb.replay import sweeper as sweeper_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.staleness import bound as bound_lib

pytestmark = [pytest.mark.slow, pytest.mark.replay, pytest.mark.timeout(120)]

_BOUND = bound_lib.StalenessBound(max_policy_lag=2, max_age_s=1000.0)
_MODES = ('queue', 'replay')


@pytest.fixture
def serve(start_server, closing):
  """Starts a server whose balance permits keep; the rig for it."""

  def start(mode='replay'):
    server = start_server(tables.TableConfig(mode=mode, balance='permits'))
    return closing(sweeper_rig.Rig(server.address))

  return start


@pytest.fixture
def sweep(closing):
  """A new sweeper of a rig's server, to be swept by hand."""

  def make(rig, kind=sweeper_lib.Sweeper, *, settle_s=0.0, bound=_BOUND):
    return closing(
      kind(rig.address, bound=bound, settle_s=settle_s, period_s=20.0)
    )

  return make


def _trajectories(*versions, **kwargs):
  return [sweeper_rig.trajectory(v, **kwargs) for v in versions]


def _keys(written):
  return {one.key for one in written}


def _removals(written, cause):
  return [
    entries.Removal(o.key, o.entry.permit_id, o.entry.length, cause)
    for o in written
  ]


@pytest.mark.parametrize('mode', _MODES)
def test_exactly_what_lags_is_removed(serve, sweep, mode):
  rig = serve(mode)
  written = _trajectories(*[1, 2, 3, 4] * 30)
  rig.write_from(4, written)
  sweeper = sweep(rig)
  rig.publish(4)
  sweeper.sweep()
  assert rig.size(tables.TRAJECTORIES) == 90
  rig.publish(5)
  sweeper.sweep()
  stale = [one for one in written if one.entry.policy_version < 3]
  assert rig.keys_left() == _keys(written) - _keys(stale)
  assert sorted(rig.removals()) == sorted(_removals(stale, bound_lib.LAG))
  assert sweeper.metrics()['swept_lag_total'] == 60
  assert sweeper.metrics()['swept_age_total'] == 0
  assert sweeper.metrics()['sweep_entries'] == 60


@pytest.mark.parametrize('mode', _MODES)
def test_exactly_what_is_too_old_is_removed(serve, sweep, mode):
  rig = serve(mode)
  fresh = _trajectories(1, 1, age_s=990.0)
  stale = _trajectories(1, 1, 7, age_s=1001.0)
  lagging = _trajectories(0, age_s=1001.0)
  rig.write(fresh + stale + lagging)
  rig.publish(3)
  sweeper = sweep(rig)
  sweeper.sweep()
  assert rig.keys_left() == _keys(fresh)
  assert sorted(rig.removals()) == sorted(
    _removals(stale, bound_lib.AGE) + _removals(lagging, bound_lib.LAG)
  )
  metrics = sweeper.metrics()
  assert metrics['swept_lag_total'] == 1 and metrics['swept_age_total'] == 3


def test_without_a_version_nothing_lags(serve, sweep):
  rig = serve()
  fresh, stale = _trajectories(0, 5), _trajectories(9, age_s=2000.0)
  rig.write(fresh + stale)
  sweep(rig).sweep()
  assert rig.keys_left() == _keys(fresh)


def test_a_learner_that_goes_back_removes_nothing_new(serve, sweep):
  rig = serve()
  rig.write(_trajectories(50, 60))
  sweeper = sweep(rig)
  for version in (52, 7):
    rig.publish(version)
    sweeper.sweep()
  assert rig.size(tables.TRAJECTORIES) == 2


def test_what_was_sampled_before_is_removed_too(serve, sweep):
  rig = serve('replay')
  written = _trajectories(1, 1, 9)
  rig.write(written)
  sampled = rig.take(tables.TRAJECTORIES, 100)
  assert {item.key for item in sampled} == _keys(written)
  rig.publish(9)
  sweep(rig).sweep()
  assert rig.keys_left() == {written[2].key}


def test_what_was_consumed_is_neither_told_nor_counted(serve, sweep):
  rig = serve('queue')
  written = _trajectories(*[1] * 10)
  rig.write(written)
  sweeper = sweep(rig)
  sweeper.sweep()
  assert len(rig.keys_left()) == 10
  rig.publish(9)
  sweeper.sweep()
  assert rig.removals() == []
  assert sweeper.metrics()['swept_lag_total'] == 0
  # Nothing is left of them anywhere.
  assert sweeper.metrics()['sweep_entries'] == 0
  assert rig.size(tables.INDEX) == rig.size(tables.ANNOUNCEMENTS) == 0


def test_consumed_ones_among_the_removed_are_told_but_not_counted(serve, sweep):
  rig = serve('queue')
  written = _trajectories(*[1] * 10)
  rig.write(written)
  consumed = {item.key for item in rig.take(tables.TRAJECTORIES, 4)}
  rig.publish(9)
  sweeper = sweep(rig)
  sweeper.sweep()
  told = {removal.key for removal in rig.removals()}
  assert told == _keys(written) and len(consumed) == 4
  assert sweeper.metrics()['swept_lag_total'] == 6
  assert rig.size(tables.TRAJECTORIES) == 0


def test_nothing_is_told_twice_while_it_settles(serve, sweep):
  rig = serve()
  stale = _trajectories(1, 1)
  rig.write(stale)
  rig.publish(9)
  sweeper = sweep(rig, settle_s=1e9)
  for _ in range(3):
    sweeper.sweep()
  assert sorted(rig.removals()) == sorted(_removals(stale, bound_lib.LAG))
  late = _trajectories(1)
  rig.write(late)
  sweeper.sweep()
  assert rig.removals() == _removals(late, bound_lib.LAG)
  assert rig.size(tables.TRAJECTORIES) == 0


@pytest.mark.parametrize('mode', _MODES)
def test_an_item_that_comes_after_its_entry_is_removed(serve, sweep, mode):
  """The server inserts into each table in a thread of its own."""
  rig = serve(mode)
  late = _trajectories(1)
  rig.write(late, trajectory=False)
  rig.publish(9)
  sweeper = sweep(rig, settle_s=1e9)
  sweeper.sweep()
  assert rig.removals() == []
  rig.write(late, index=False, announce=False)
  sweeper.sweep()
  assert rig.size(tables.TRAJECTORIES) == 0
  assert rig.removals() == _removals(late, bound_lib.LAG)
  assert sweeper.metrics()['swept_lag_total'] == 1


def test_entries_are_laid_together_and_leave_the_index(serve, sweep):
  rig = serve()
  old, new = _trajectories(*[1] * 300), _trajectories(*[4] * 300)
  rig.write(old)
  sweeper = sweep(rig)
  sweeper.sweep()
  assert rig.size(tables.INDEX) == 1
  rig.write(new)
  sweeper.sweep()
  assert rig.size(tables.INDEX) == 2
  rig.publish(4)
  sweeper.sweep()
  assert rig.size(tables.INDEX) == 1
  assert rig.keys_left() == _keys(new)
  rig.publish(9)
  sweeper.sweep()
  assert rig.size(tables.INDEX) == rig.size(tables.TRAJECTORIES) == 0


def test_an_entry_whose_announcement_was_lost_is_found(
  serve, sweep, monkeypatch
):
  rig = serve()
  sweeper = sweep(rig)
  rig.write(_trajectories(*[8] * 300))
  sweeper.sweep()
  lost = _trajectories(1, 8, 1)
  rig.write(lost, announce=False)
  rig.publish(9)
  sweeper.sweep()
  assert rig.size(tables.TRAJECTORIES) == 303
  monkeypatch.setattr(sweeper_lib, '_READING_PERIOD_S', 0.0)
  sweeper.sweep()
  assert rig.size(tables.TRAJECTORIES) == 301
  assert lost[1].key in rig.keys_left()


class _Crash(Exception):
  pass


def _crashing(method, when, number=1):
  """A sweeper that dies before or after a call of `method` with work to do."""
  numbers = itertools.count(1)

  class CrashingSweeper(sweeper_lib.Sweeper):
    pass

  def crash(self, *args, **kwargs):
    has_work = method != '_delete' or len(args[1])
    dies = has_work and next(numbers) == number
    if dies and when == 'before':
      raise _Crash(method)
    result = getattr(sweeper_lib.Sweeper, method)(self, *args, **kwargs)
    if dies:
      raise _Crash(method)
    return result

  setattr(CrashingSweeper, method, crash)
  return CrashingSweeper


@pytest.mark.parametrize('mode', _MODES)
@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize(
  ('method', 'number'),
  [
    ('_take_announcements', 1),
    ('_read_index', 1),
    ('_insert_into_index', 1),
    ('_lay_together', 1),
    ('_delete', 1),
    ('_delete', 2),
    ('_delete', 3),
    ('_num_deleted', 2),
    ('_tell', 1),
    ('_forget', 1),
  ],
)
def test_a_sweeper_that_dies_forgets_nothing(
  serve, sweep, method, number, when, mode
):
  rig = serve(mode)
  written = _trajectories(*[1] * 300, *[5] * 20)
  rig.write(written)
  rig.publish(5)
  dying = sweep(rig, _crashing(method, when, number))
  with pytest.raises(_Crash):
    dying.sweep()
  dying.close()
  heir = sweep(rig)
  heir.sweep()
  fresh = _keys(written[300:])
  assert rig.size(tables.TRAJECTORIES) == 20
  assert {r.key for r in rig.removals()} == _keys(written) - fresh
  # What is left is known, and goes when its time has come.
  rig.publish(8)
  heir.sweep()
  assert rig.size(tables.TRAJECTORIES) == rig.size(tables.INDEX) == 0
  assert {r.key for r in rig.removals()} == fresh


@pytest.mark.parametrize(
  ('method', 'number'), [('_delete', 1), ('_num_deleted', 2), ('_tell', 1)]
)
@pytest.mark.parametrize('when', ['before', 'after'])
def test_a_sweep_that_fails_is_made_up_for_by_the_next(
  serve, sweep, method, number, when
):
  rig = serve('queue')
  written = _trajectories(1, 1)
  rig.write(written)
  rig.publish(9)
  sweeper = sweep(rig, _crashing(method, when, number))
  with pytest.raises(_Crash):
    sweeper.sweep()
  sweeper.sweep()
  assert {r.key for r in rig.removals()} == _keys(written)
  assert rig.size(tables.TRAJECTORIES) == rig.size(tables.INDEX) == 0


def test_readings_go_on_where_one_that_died_left_marks(serve, sweep):
  """Also if the clock went back in between."""
  rig = serve()
  written = _trajectories(*range(20))
  rig.write(written)
  for _ in range(3):
    reader = sweep(rig)
    infos = admin.info(rig.address, sweeper_rig.TIMEOUT_S)
    # One item, then its deadline is past.
    assert len(reader._index.read(infos[tables.INDEX], 0.0)) == 1
    assert reader._index.reading
    reader.close()
  rig.take(tables.ANNOUNCEMENTS, 20)
  heir = sweep(rig)
  heir.sweep()
  assert heir.metrics()['sweep_entries'] == 20


def test_unreadable_entries_cost_their_items_only(serve, sweep):
  rig = serve()
  good, bad = _trajectories(5, 5), _trajectories(5, 5)
  rig.write(good)
  inserter = insert_stream.Inserter(rig.address)
  rig.write(bad, index=False, announce=False)
  inserter.insert(
    [
      insert_stream.NewItem([(table, key, 5.0)], [np.zeros(3)])
      for table, key in (
        (tables.INDEX, bad[0].key),
        (tables.ANNOUNCEMENTS, bad[1].key),
      )
    ],
    10.0,
  )
  inserter.close()
  sweeper = sweep(rig)
  sweeper.sweep()
  assert rig.keys_left() == _keys(good)
  assert sweeper.metrics()['sweep_entries'] == 2
  assert rig.size(tables.INDEX) == 2


@pytest.mark.parametrize('mode', _MODES)
def test_all_at_once_and_the_table_goes_on(serve, sweep, mode):
  rig = serve(mode)
  sweeper = sweep(rig)
  for _ in range(20):
    rig.write(_trajectories(*[1] * 500))
    sweeper.sweep()
  rig.publish(9)
  sweeper.sweep()
  assert rig.size(tables.TRAJECTORIES) == rig.size(tables.INDEX) == 0
  assert sweeper.metrics()['swept_lag_total'] == 10_000
  assert len({r.key for r in rig.removals()}) == 10_000
  # A limiter would hold inserts back now, or hand out the rest too often.
  written = _trajectories(*[9] * 1000)
  rig.write_from(2, written[:500])
  rig.write(written[500:])
  if mode == 'queue':
    assert rig.keys_left() == _keys(written)
  else:
    assert len(rig.take(tables.TRAJECTORIES, 2000)) == 2000
    assert rig.size(tables.TRAJECTORIES) == 1000
  state = clients.limiter_state(rig.address, 10.0)[tables.TRAJECTORIES]
  assert state.can_insert and state.can_sample == (mode == 'replay')


@pytest.mark.parametrize('mode', _MODES)
def test_a_table_with_a_limiter_is_left_alone(
  start_server, closing, sweep, mode
):
  server = start_server(tables.TableConfig(mode=mode, max_items=4))
  rig = closing(sweeper_rig.Rig(server.address))
  written = _trajectories(1, 1)
  rig.write(written, index=False, announce=False)
  rig.publish(9)
  sweeper = sweep(rig)
  with pytest.raises(ValueError, match='must be kept by permits'):
    sweeper.sweep()
  assert rig.size(tables.TRAJECTORIES) == 2


def test_a_server_gets_a_sweeper_if_permits_keep_its_balance(
  start_server, closing
):
  config = config_lib.ExperimentConfig()
  plain = start_server()
  assert builder.make_sweeper(config, plain, sweeper_rig.COLUMNS) is None
  server = start_server(tables.TableConfig(balance='permits'))
  made = builder.make_sweeper(config, server, sweeper_rig.COLUMNS)
  closing(made).sweep()


def _wait_for(condition):
  deadline_s = time.monotonic() + 20.0
  while not condition():
    assert time.monotonic() < deadline_s
    time.sleep(0.01)


def test_the_thread_sweeps_by_itself_while_writers_write(serve, closing):
  rig = serve('queue')
  sweeper = closing(
    sweeper_lib.Sweeper(rig.address, bound=_BOUND, period_s=0.05).start()
  )
  for version in range(6):
    rig.publish(version)
    rig.write_from(2, _trajectories(*[version] * 10))
  _wait_for(lambda: rig.size(tables.TRAJECTORIES) <= 30)
  assert len(rig.keys_left()) == 30
  assert sweeper.metrics()['swept_lag_total'] == 30
  assert {r.cause for r in rig.removals()} == {bound_lib.LAG}


def test_the_thread_outlives_calls_that_fail(serve, closing):
  rig = serve()
  failures = iter([errors.ReplayUnavailableError('x')] * 3)

  class Unlucky(sweeper_lib.Sweeper):
    def _learner_version(self, infos):
      for failure in failures:
        raise failure
      return super()._learner_version(infos)

  rig.publish(9)
  rig.write(_trajectories(1))
  closing(Unlucky(rig.address, bound=_BOUND, period_s=0.01).start())
  _wait_for(lambda: rig.size(tables.TRAJECTORIES) == 0)


def test_a_thread_that_failed_is_told_by_its_metrics(serve, closing):
  rig = serve()
  failed = threading.Event()

  class Failing(sweeper_lib.Sweeper):
    def sweep(self):
      failed.set()
      raise KeyError('sweep')

  sweeper = closing(Failing(rig.address, bound=_BOUND, period_s=0.01).start())
  assert failed.wait(10.0)
  sweeper._thread.join(10.0)
  with pytest.raises(RuntimeError, match='the sweeper failed') as info:
    sweeper.metrics()
  assert isinstance(info.value.__cause__, KeyError)


def test_close_is_prompt_and_final(serve):
  rig = serve()
  sweeper = sweeper_lib.Sweeper(rig.address, bound=_BOUND, period_s=60.0)
  sweeper.start()
  start_s = time.monotonic()
  sweeper.close()
  sweeper.close()
  assert time.monotonic() - start_s < 2.0
  assert not sweeper._thread.is_alive()
  sweeper.metrics()
