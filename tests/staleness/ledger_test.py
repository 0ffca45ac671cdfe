"""Permits against a model of table, actors and learner under any schedule."""

import collections
import dataclasses
import random

import hypothesis
from hypothesis import strategies as st
import pytest

from tunix_reverb.staleness import ledger as ledger_lib

_LATE = ledger_lib.Arrival.LATE
_LIVE = ledger_lib.Arrival.LIVE
_SETTLED = ledger_lib.Arrival.SETTLED


def _ledger(
  *, size=2, lag=1, permits=None, lease_s=10.0, first_id=1, version=1
):
  return ledger_lib.PermitLedger(
    trajectories_per_update=size,
    max_policy_lag=lag,
    num_permits=permits or (lag + 1) * size,
    lease_s=lease_s,
    first_id=first_id,
    policy_version=version,
  )


def _counts(ledger):
  return tuple(ledger.counts)


def test_the_stock_is_an_update_and_the_rest_stays_as_credit():
  ledger = _ledger(size=2, lag=3)
  assert ledger.issue() == [(1, 1), (2, 1)]
  assert ledger.issue() == []
  assert _counts(ledger) == (6, 2, 0, 0)
  ledger.observe_taken(1, 0.0)
  assert ledger.issue() == [(3, 1)], 'topped up as it drains'
  assert ledger.stock_ids == [2, 3]


def test_fewer_permits_than_the_lag_allows_leave_the_rest_of_the_rules():
  ledger = _ledger(size=2, lag=3, permits=3)
  assert ledger.issue() == [(1, 1), (2, 1)]
  ledger.observe_taken(2, 0.0)
  assert ledger.issue() == [(3, 1)]
  ledger.observe_taken(3, 0.0)
  assert ledger.issue() == [], 'as many as there are'
  for permit_id in (2, 3):
    ledger.arrive(permit_id, 1.0)
    ledger.settle([permit_id])
  assert ledger.advance()
  ledger.confirm(2)
  assert ledger.issue() == [(4, 2), (5, 2)]
  assert not ledger.holds(2), 'the one that is out has three versions more'
  assert ledger.holds(3)


def test_a_permit_goes_round():
  ledger = _ledger(size=1, lag=0)
  ledger.issue()
  ledger.observe_taken(1, 0.0)
  assert _counts(ledger) == (0, 0, 1, 0)
  assert ledger.arrive(1, 1.0) is _LIVE
  assert _counts(ledger) == (0, 0, 0, 1) and ledger.is_all_in
  ledger.settle([1])
  assert _counts(ledger) == (1, 0, 0, 0)
  assert ledger.issue() == [(2, 1)], 'under a new id'


def test_permits_never_carry_an_older_version_than_is_confirmed():
  ledger = _ledger(size=2, lag=1)
  ledger.issue()
  ledger.observe_taken(1, 0.0)
  assert ledger.advance()
  assert not ledger.stock_is_outdated, 'actors cannot get it yet'
  ledger.confirm(2)
  assert ledger.stock_is_outdated
  assert ledger.issue() == [], 'the outdated come out first'
  ledger.withdraw()
  assert ledger.issue() == [(3, 2), (4, 2)]


def test_what_arrives_before_it_was_seen_taken_was_taken():
  ledger = _ledger(size=3, lag=0)
  ledger.issue()
  assert ledger.arrive(2, 0.0) is _LIVE
  assert _counts(ledger) == (0, 1, 1, 1), 'and so was what lay before it'
  ledger.observe_taken(1, 0.0)  # An answer from before.
  assert _counts(ledger) == (0, 1, 1, 1)
  ledger.observe_taken(3, 0.0)
  assert _counts(ledger) == (0, 0, 2, 1)


def test_a_lease_runs_from_the_taking():
  ledger = _ledger(size=2, lag=0, lease_s=10.0)
  ledger.issue()
  ledger.observe_taken(1, 100.0)
  ledger.observe_taken(2, 105.0)
  assert ledger.expire(110.0) == []
  assert ledger.expire(110.5) == [1]
  assert _counts(ledger) == (1, 0, 1, 0) and ledger.reissued_total == 1
  assert ledger.issue() == [(3, 1)]
  assert ledger.arrive(1, 111.0) is _LATE
  ledger.settle([1])
  assert _counts(ledger) == (0, 1, 1, 0), 'a late one brings nothing back'


def test_a_restarted_server_shortens_the_wait_for_what_it_may_have_lost():
  ledger = _ledger(size=4, lag=0, lease_s=600.0)
  ledger.issue()
  ledger.observe_taken(2, 0.0)
  ledger.arrive(1, 30.0)  # The longest so far.
  ledger.observe_taken(4, 100.0)
  ledger.doubt(100.0)
  assert ledger.arrive(2, 155.0) is _LIVE, 'it was under way'
  assert ledger.expire(160.0) == []
  assert ledger.expire(160.1) == [3, 4], 'twice the longest later'
  assert ledger.issue() and ledger.observe_taken(6, 200.0) is None
  assert ledger.expire(700.0) == [], 'permits taken since have their lease'


def test_a_lease_that_ends_earlier_is_not_made_longer():
  ledger = _ledger(size=1, lag=0, lease_s=5.0)
  ledger.issue()
  ledger.observe_taken(1, 0.0)
  ledger.doubt(4.0)
  assert ledger.expire(5.1) == [1]


def test_a_trajectory_is_settled_once_whatever_is_told_of_it():
  ledger = _ledger(size=2, lag=0)
  ledger.issue()
  ledger.observe_taken(2, 0.0)
  assert ledger.remove(1, 0.0), 'removed before it arrived'
  assert not ledger.remove(1, 0.0), 'told twice'
  assert ledger.arrive(1, 0.0) is _SETTLED, 'sampled before the removal'
  ledger.settle([1])
  assert ledger.arrive(2, 0.0) is _LIVE
  assert not ledger.remove(2, 0.0), 'it is here'
  assert ledger.arrive(2, 0.0) is _SETTLED, 'a restarted server repeats itself'
  ledger.settle([2])
  assert not ledger.remove(2, 0.0)
  assert _counts(ledger) == (2, 0, 0, 0)


def test_permits_of_an_earlier_learner_bring_nothing_back():
  ledger = _ledger(size=2, lag=0, first_id=1000)
  assert ledger.arrive(7, 0.0) is _LATE
  assert ledger.arrive(7, 0.0) is _SETTLED
  assert ledger.remove(8, 0.0), 'a drop like any other'
  for _ in range(2):
    assert ledger.arrive(0, 0.0) is _LATE, 'no permit at all'
  ledger.settle([7, 8, 0])
  assert _counts(ledger) == (2, 0, 0, 0)


def test_without_lag_nothing_may_be_out():
  ledger = _ledger(size=2, lag=0)
  assert ledger.holds(1), 'not even issued'
  ledger.issue()
  ledger.observe_taken(2, 0.0)
  ledger.arrive(1, 0.0)
  assert ledger.holds(1)
  ledger.arrive(2, 0.0)
  assert ledger.is_all_in and not ledger.holds(1)
  assert not ledger.advance(), 'they are of the version that would be left'
  ledger.settle([1, 2])
  assert ledger.advance()
  assert ledger.issue() == [], 'actors cannot get version 2 yet'
  ledger.confirm(2)
  assert ledger.issue() == [(3, 2), (4, 2)]


def test_the_learner_goes_as_far_as_the_oldest_allows():
  ledger = _ledger(size=1, lag=2)
  ledger.issue()
  ledger.observe_taken(1, 0.0)  # Of version 1: may be learnt up to version 3.
  for version in (2, 3):
    assert not ledger.holds(1)
    assert ledger.advance()
    ledger.confirm(version)
    ledger.withdraw()
    ledger.issue()
  assert ledger.holds(1) and not ledger.holds(0)
  assert not ledger.advance()
  ledger.arrive(1, 0.0)
  assert not ledger.holds(1)
  assert not ledger.advance(), 'it must be in the update before'
  ledger.settle([1])
  assert ledger.advance() and ledger.policy_version == 4


@pytest.mark.parametrize('ahead, holds', [(1, False), (2, False), (3, True)])
def test_updates_packed_ahead_count(ahead, holds):
  ledger = _ledger(size=1, lag=2)
  ledger.issue()
  ledger.observe_taken(1, 0.0)
  assert ledger.holds(ahead) == holds


@dataclasses.dataclass
class _Episode:
  permit_id: int
  version: int  # Of the policy that began it.


class _Model:
  """A table, actors and a learner that follow the ledger's rules.

  Each method is something that may happen at any time.
  """

  def __init__(self, *, size, lag, spare, lease_s, num_actors=100, hold=True):
    self.size, self.lag = size, lag
    self.num_actors, self.hold = num_actors, hold
    self.ledger = _ledger(
      size=size,
      lag=lag,
      permits=size + min(spare, lag * size),
      lease_s=lease_s,
    )
    self.total = sum(self.ledger.counts)
    self.now_s = 0.0
    self.table = collections.deque()
    self.taken_total = 0
    self.variables = 1  # What actors can get.
    self.running: list[_Episode] = []
    self.pending: list[_Episode] = []
    self.batches = collections.deque()
    self.learnt: list[_Episode] = []
    self.stale: list[_Episode] = []
    self.updates = 0
    self.refused = 0  # Publishes.

  def feed(self, _):
    """Keeps the stock, as `learner.admission` does."""
    ledger = self.ledger
    ledger.confirm(self.variables)
    if ledger.stock_is_outdated:
      self.table.clear()
    ledger.observe_taken(self.taken_total, self.now_s)
    ledger.expire(self.now_s)
    if ledger.stock_is_outdated:
      ledger.withdraw()
    self.table.extend(ledger.issue())

  def take(self, n):
    """An actor takes a permit; its variables may be older than the newest."""
    if self.table and len(self.running) < self.num_actors:
      permit = self.table.popleft()
      self.taken_total += 1
      version = max(permit.policy_version, self.variables - n % 3)
      self.running.append(_Episode(permit.permit_id, version))

  def end(self, n):
    """Any trajectory ends and arrives, the slowest last or first."""
    if self.running:
      episode = self.running.pop(n % len(self.running))
      if self.ledger.arrive(episode.permit_id, self.now_s) is not _SETTLED:
        self.pending.append(episode)

  def die(self, n):
    """A trajectory's actor is killed."""
    if self.running:
      self.running.pop(n % len(self.running))

  def wait(self, n):
    self.now_s += n % 5

  def remove(self, n):
    """The sweeper removes one."""
    if self.running:
      episode = self.running.pop(n % len(self.running))
      assert self.ledger.remove(episode.permit_id, self.now_s)

  def pack(self, _):
    """Packs an update of the oldest permits."""
    enough = len(self.pending) >= self.size or (
      self.pending and self.ledger.is_all_in
    )
    held = self.hold and self.ledger.holds(len(self.batches) + 1)
    if enough and not held:
      self.pending.sort(key=lambda e: e.permit_id)
      batch, self.pending = (
        self.pending[: self.size],
        self.pending[self.size :],
      )
      self.batches.append(batch)

  def learn(self, _):
    if not self.batches:
      return
    batch = self.batches.popleft()
    version = self.ledger.policy_version
    for episode in batch:
      stale = version - episode.version > self.lag
      (self.stale if stale else self.learnt).append(episode)
    self.updates += 1
    self.ledger.settle(e.permit_id for e in batch)
    if self.variables == version:  # Else the last publish is under way.
      self.refused += not self.ledger.advance()

  def publish(self, _):
    self.variables = self.ledger.policy_version

  def check(self):
    counts = self.ledger.counts
    assert min(counts) >= 0 and sum(counts) == self.total
    assert counts.stock <= self.size
    assert {p.permit_id for p in self.table} <= set(self.ledger.stock_ids)


_HEALTHY = ('feed', 'take', 'take', 'end', 'wait', 'pack', 'learn', 'publish')
_FAULTS = ('die', 'remove')


def _schedules(names):
  """60 rounds, in each of which half of `names` happens; n says to whom.

  Drawn from a seed: lists that hypothesis builds itself are mostly too short
  for anything to grow old in.
  """

  def draw(seed):
    rng = random.Random(seed)
    for _ in range(60):
      n = rng.randrange(12)
      for name in names:
        if rng.random() < 0.5:
          yield name, n

  return st.integers(0, 2**32).map(draw)


def _play(model, schedule):
  for name, n in schedule:
    getattr(model, name)(n)
    model.check()


# `spare`: permits beyond those of one update.
_SIZES = {
  'size': st.integers(1, 4),
  'lag': st.integers(0, 4),
  'spare': st.integers(0, 16),
}


@hypothesis.given(schedule=_schedules(_HEALTHY), hold=st.booleans(), **_SIZES)
@hypothesis.settings(max_examples=300, deadline=None)
def test_nothing_begun_under_a_live_permit_is_ever_stale(
  schedule, hold, size, lag, spare
):
  # Whether it holds its updates or, without a publish, makes some more.
  model = _Model(size=size, lag=lag, spare=spare, lease_s=1e9, hold=hold)
  _play(model, schedule)
  assert model.stale == []
  if lag == 0:
    # Synchronous: every update has all of its version and nothing else.
    versions = [e.version for e in model.learnt]
    assert versions == [1 + i // size for i in range(len(versions))]


@hypothesis.given(schedule=_schedules(_HEALTHY), **_SIZES)
@hypothesis.settings(max_examples=300, deadline=None)
def test_a_learner_that_holds_publishes_after_every_update(
  schedule, size, lag, spare
):
  # As long as no more are out than an update takes.
  model = _Model(size=size, lag=lag, spare=spare, lease_s=1e9, num_actors=size)
  _play(model, schedule)
  assert model.refused == 0


@hypothesis.given(schedule=_schedules(_HEALTHY + _FAULTS), **_SIZES)
@hypothesis.settings(max_examples=300, deadline=None)
def test_whatever_happened_the_learner_goes_on(schedule, size, lag, spare):
  model = _Model(size=size, lag=lag, spare=spare, lease_s=20.0)
  _play(model, schedule)
  before, begun_s = model.updates, model.now_s
  for i in range(400):
    if model.updates >= before + 5:
      break
    # `end` takes the youngest first, so that the oldest holds the learner up.
    for name in ('feed', 'take', 'take', 'pack', 'learn', 'publish'):
      getattr(model, name)(0)
    if i % 3 == 0:
      model.end(len(model.running) - 1)
    model.now_s += 0.5
    model.check()
  assert model.updates >= before + 5, (model.ledger.counts, model.pending)
  assert model.now_s - begun_s < 200.0
