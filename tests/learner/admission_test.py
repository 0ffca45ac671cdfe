"""Admission against a table that loses, refuses and comes back."""

import collections
import contextlib
import threading
import time

import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.learner import admission as admission_lib
from tunix_reverb.staleness import bound as bound_lib
from tunix_reverb.telemetry import drops as drops_lib

_TIMEOUT_S = 20.0


class _Table(core.PermitTable):
  """The table of permits in memory, with a server's whims.

  Attributes:
    fail: names of the calls that fail next; `+` after a name lets the call
      have its effect all the same.
    removed: what `removals` tells next.
    calls: names of the calls made.
  """

  def __init__(self):
    self.lock = threading.Lock()
    self.items = collections.deque([types.Permit(7, 1)])  # Of another learner.
    self.inserts, self.samples = 5, 4
    self.fail = []
    self.removed = []
    self.calls = []

  def _call(self, name, effect):
    with self.lock:
      self.calls.append(name)
      for how in (name, name + '+'):
        if how in self.fail:
          self.fail.remove(how)
          if how != name:
            effect()
          raise errors.DeadlineExceededError(f'{name} of the test')
      return effect()

  def reset(self):
    def effect():
      self.items.clear()
      self.inserts = self.samples = 0

    self._call('reset', effect)

  def state(self):
    return self._call(
      'state',
      lambda: types.PermitTableState(
        self.inserts, self.samples, len(self.items)
      ),
    )

  def insert(self, permits):
    def effect():
      self.items += permits
      self.inserts += len(permits)

    self._call('insert', effect)

  def delete(self, permit_ids):
    def effect():
      kept = [p for p in self.items if p.permit_id not in set(permit_ids)]
      self.items = collections.deque(kept)

    self._call('delete', effect)

  def removals(self):
    def effect():
      removed, self.removed = self.removed, []
      return removed

    return self._call('removals', effect)

  def take(self, count=1):
    """What an actor takes, as soon as there are so many."""

    def enough():
      return len(self.items) >= count

    _wait(enough)
    with self.lock:
      self.samples += count
      return [self.items.popleft() for _ in range(count)]


def _wait(condition):
  deadline_s = time.monotonic() + _TIMEOUT_S
  while not condition():
    assert time.monotonic() < deadline_s
    time.sleep(0.002)


class _Learner:
  """Admission and those who call it, one after the other."""

  def __init__(self, *, size=2, lag=1, lease_s=1e9, publish_period=1, **kwargs):
    self.table = _Table()
    self.version = self.confirmed = 3
    self.drops = drops_lib.DropCounter(('lag', 'age'))
    self.learner_step = 10
    self.admission = admission_lib.Admission(
      self.table,
      trajectories_per_update=size,
      max_policy_lag=lag,
      num_permits=(lag + 1) * size,
      lease_s=lease_s,
      publish_period=publish_period,
      confirmed_version=lambda: self.confirmed,
      drops=self.drops,
      **kwargs,
    )
    self.admission.start(policy_version=3, learner_step=10)

  def arrive(self, *permits):
    ids = np.array([p.permit_id for p in permits], np.int64)
    return self.admission.arrive(ids).tolist()

  def learn(self, *permits, confirm=True):
    """An update on these; returns whether it was followed by a publish."""
    self.learner_step += 1
    publishes = self.admission.finish(
      np.array([p.permit_id for p in permits], np.int64),
      learner_step=self.learner_step,
      publish=True,
    )
    self.version += publishes
    if confirm:
      self.confirmed = self.version
    return publishes

  def may_pack(self, pending, is_ready=True):
    return self.admission.may_pack(pending, is_ready=is_ready)

  def metrics(self):
    return self.admission.metrics()


@pytest.fixture
def make():
  """Makes learners; closes them after the test."""
  made = []

  def _make(**kwargs):
    made.append(_Learner(**kwargs))
    return made[-1]

  yield _make
  for learner in made:
    learner.admission.close()
    assert not learner.admission._thread.is_alive()


def test_it_starts_with_an_empty_table_and_new_ids(make):
  learner = make()
  first, second = learner.table.take(2)
  assert learner.table.calls[:2] == ['state', 'reset']
  assert first.policy_version == second.policy_version == 3
  assert second.permit_id == first.permit_id + 1 > 7
  later = admission_lib.first_permit_id(time.time() + 0.25)
  assert second.permit_id < later < 2**63


def test_a_permit_comes_back_with_its_update_and_no_earlier(make):
  learner = make(size=2, lag=0)
  taken = learner.table.take(2)
  assert learner.arrive(*taken) == [True, True]
  assert learner.may_pack(2, is_ready=False), 'all is in'
  _wait(lambda: learner.metrics()['permits_taken'] == 0)
  assert not learner.table.items
  assert learner.learn(*taken)
  renewed = learner.table.take(2)
  assert [p.policy_version for p in renewed] == [4, 4]
  assert not {p.permit_id for p in renewed} & {p.permit_id for p in taken}


def test_a_dropped_trajectory_gives_its_permit_back(make):
  learner = make(size=1, lag=0)
  (taken,) = learner.table.take(1)
  learner.arrive(taken)
  learner.admission.settle(np.array([taken.permit_id]))
  (renewed,) = learner.table.take(1)
  assert renewed.permit_id > taken.permit_id


def test_removals_are_counted_once_and_give_their_permits_back(make):
  learner = make(size=3, lag=0)
  lost, came, unused = learner.table.take(3)
  learner.arrive(came)
  learner.table.removed = [
    types.Removal(lost.permit_id, 9, bound_lib.LAG),
    types.Removal(lost.permit_id, 9, bound_lib.LAG),
    types.Removal(came.permit_id, 5, bound_lib.AGE),
    types.Removal(unused.permit_id, 0, bound_lib.FRESH),
    types.Removal(1, 4, bound_lib.AGE),  # Of an earlier learner.
  ]
  assert len(learner.table.take(2)) == 2
  assert learner.drops.by_cause() == {'lag': 1, 'age': 1}
  assert learner.drops.seen_total == 2
  assert learner.arrive(lost) == [False], 'it was told of already'


def test_untaken_permits_follow_the_confirmed_version(make):
  learner = make(size=2, lag=1)
  taken = learner.table.take(2)
  learner.arrive(*taken)
  _wait(lambda: len(learner.table.items) == 2)
  assert learner.may_pack(2)
  assert learner.learn(*taken, confirm=False)
  time.sleep(0.1)  # Five rounds: no publish, no newer permits.
  assert {p.policy_version for p in learner.table.items} == {3}
  learner.confirmed = 4
  _wait(lambda: {p.policy_version for p in learner.table.items} == {4})
  assert len(learner.table.items) == 2


def test_an_update_is_held_for_the_last_and_named(make):
  named = []

  @contextlib.contextmanager
  def waiting(what):
    named.append(what)
    yield
    named.append('over')

  live = []
  learner = make(
    size=1, lag=1, waiting=waiting, on_live_lease=lambda: live.append(1)
  )
  (slow,) = learner.table.take(1)
  (fast,) = learner.table.take(1)
  learner.arrive(fast)
  assert learner.may_pack(1) and learner.learn(fast)
  (fast,) = learner.table.take(1)
  assert fast.policy_version == 4
  learner.arrive(fast)
  begin_s = time.monotonic()
  assert not learner.may_pack(1), 'slow would be stale after it'
  assert not learner.may_pack(1)
  assert named and 'holds' in named[0] and '3' in named[0]
  assert live, 'a wait with a deadline of its own is no hang'
  learner.arrive(slow)
  assert learner.may_pack(2)
  assert named[1:] == ['over']
  held_s = learner.metrics()['admission_hold_s_total']
  assert 0 < held_s <= time.monotonic() - begin_s
  # Both are of versions that this update may still learn.
  assert learner.learn(slow, fast)


def test_a_lease_that_ends_lets_the_learner_go_on(make):
  learner = make(size=1, lag=1, lease_s=0.3)
  learner.table.take(1)  # Its actor dies.
  (fast,) = learner.table.take(1)
  learner.arrive(fast)
  assert learner.may_pack(1) and learner.learn(fast)
  (fast,) = learner.table.take(1)
  learner.arrive(fast)
  _wait(lambda: learner.may_pack(1))
  assert learner.learn(fast)
  assert learner.metrics()['permits_reissued_total'] == 1
  assert len(learner.table.take(1)) == 1


def test_a_batch_ahead_counts_as_the_update_it_will_be(make):
  learner = make(size=1, lag=1)
  learner.table.take(1)  # A slow one.
  (fast,) = learner.table.take(1)
  learner.arrive(fast)
  assert learner.may_pack(1)
  assert not learner.may_pack(1), (
    'the slow one has one update left, which is packed'
  )
  learner.learn(fast)


def test_updates_between_publishes_are_not_held(make):
  # Learner steps 11 to 13 publish nothing, and step 14 does.
  learner = make(size=1, lag=0, publish_period=14)
  learner.table.take(1)
  for _ in range(3):
    assert learner.may_pack(1)
  assert not learner.may_pack(1)


@pytest.mark.parametrize(
  'fault', ['insert', 'insert+', 'delete', 'delete+', 'state', 'reset+']
)
def test_a_call_whose_fate_is_unknown_loses_no_permit(make, fault):
  learner = make(size=2, lag=1)
  taken = learner.table.take(2)
  _wait(lambda: len(learner.table.items) == 2)
  with learner.table.lock:
    learner.table.fail.append(fault)
    if fault == 'reset+':
      learner.table.inserts += 1  # Something is wrong: it must be reset.
  learner.arrive(*taken)
  assert learner.may_pack(2)
  assert learner.learn(*taken)  # Now the stock is to be replaced.
  _wait(lambda: not learner.table.fail)
  _total_is(learner, 4)


def _total_is(learner, total):
  """All permits are in the table or with the learner, none twice."""

  def complete():
    metrics = learner.metrics()
    counts = learner.admission._ledger.counts
    return (
      sum(counts) == total
      and len(learner.table.items) == metrics['permits_untaken'] == 2
      and {p.policy_version for p in learner.table.items} == {learner.version}
    )

  _wait(complete)


def test_a_server_that_comes_back_without_permits_gets_them_anew(make):
  learner = make(size=2, lag=0)
  _wait(lambda: len(learner.table.items) == 2)
  before = {p.permit_id for p in learner.table.items}
  with learner.table.lock:
    learner.table.items.clear()
    learner.table.inserts = learner.table.samples = 0
  taken = learner.table.take(2)
  assert not before & {p.permit_id for p in taken}


def test_a_server_that_comes_back_older_does_not_give_permits_twice(make):
  learner = make(size=2, lag=1)
  _wait(lambda: len(learner.table.items) == 2)
  with learner.table.lock:
    checkpoint = list(learner.table.items), learner.table.inserts
  taken = learner.table.take(2)
  _wait(lambda: len(learner.table.items) == 2)
  with learner.table.lock:
    items, learner.table.inserts = checkpoint
    learner.table.items = collections.deque(items)
    learner.table.samples = 0
  _wait(
    lambda: (
      not {p.permit_id for p in learner.table.items}
      & {p.permit_id for p in taken}
    )
  )
  _wait(lambda: learner.metrics()['permits_untaken'] == 2)
  assert learner.arrive(*taken) == [True, True]
  assert learner.arrive(*taken) == [False, False], 'sampled twice'


def test_an_error_in_its_thread_reaches_the_feed(make):
  learner = make()
  _wait(lambda: learner.table.items)

  def broken():
    raise KeyError('of the test')

  learner.admission._confirmed_version = broken
  with pytest.raises(RuntimeError, match='permits') as e:
    _wait(lambda: learner.may_pack(0))
  assert isinstance(e.value.__cause__, KeyError)
