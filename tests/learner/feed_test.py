"""The feed: what reaches the learner, what is dropped, and what is counted."""

import collections
import threading
import time

import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.batching import buckets as buckets_lib
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.learner import feed as feed_lib
from tunix_reverb.learner import test_utils
from tunix_reverb.staleness import bound as bound_lib
from tunix_reverb.telemetry import drops as drops_lib
from tunix_reverb.telemetry import metrics

_BUCKETS = buckets_lib.make_buckets((8,), batch_positions=16)  # Two rows of 8.
_BOUND = bound_lib.StalenessBound(max_policy_lag=5, max_age_s=100.0)


class _Sampler(core.ItemSampler):
  """Hands out `items` one after the other; then `then` is raised, if any."""

  def __init__(self, items, then=None):
    self.items = collections.deque(items)
    self.held = []
    self.taken = 0
    self.empty = threading.Event()
    self._then = then

  def sample(self, timeout_s):
    if self.items:
      self.taken += 1
      return types.SampledItem(0, 0.0, 1, self.items.popleft())
    self.empty.set()
    if self._then is not None:
      raise self._then
    time.sleep(0.001)
    return None

  def close(self):
    left = [types.SampledItem(0, 0.0, 1, t) for t in self.held]
    self.held.clear()
    return left


class _Feed:
  """A feed over `items`, its counters, and what it placed."""

  def __init__(self, items, *, then=None, version=1, prefetch=1, **kwargs):
    self.sampler = _Sampler(items, then)
    self.packer = packer_lib.Packer(
      buckets=_BUCKETS,
      columns=specs.trajectories_spec(test_utils.SPEC),
      window=1.0,
      max_trajectories=kwargs.pop('max_trajectories', 0),
    )
    self.drops = drops_lib.DropCounter(metrics.DROP_CAUSES)
    self.placed = []
    self.items_seen = 0
    self.feed = feed_lib.Feed(
      self.sampler,
      self.packer,
      bound=kwargs.pop('bound', _BOUND),
      drops=self.drops,
      place=kwargs.pop('place', self._place),
      learner_version=lambda: version,
      prefetch_batches=prefetch,
      timeout_s=kwargs.pop('timeout_s', 10.0),
      on_item=self._on_item,
      **kwargs,
    )

  def _place(self, batch):
    self.placed.append(batch)
    return batch._replace(reward=batch.reward + 1000, is_rejected='on devices')

  def _on_item(self):
    self.items_seen += 1


@pytest.fixture
def make():
  """Makes a started `_Feed`; closes it after the test."""
  made = []

  def _make(*args, **kwargs):
    made.append(_Feed(*args, **kwargs))
    made[-1].feed.start()
    return made[-1]

  yield _make
  for one in made:
    one.feed.close()


def _item(lengths, **kwargs):
  return test_utils.trajectories(lengths, **kwargs)


def test_batches_are_placed(make):
  one = make([_item([7, 7])])
  packed = next(one.feed)
  assert packed.segments.length.tolist() == [7, 7]
  assert packed.bucket == 8
  (placed,) = one.placed
  np.testing.assert_array_equal(packed.batch.reward, placed.reward + 1000)
  assert packed.batch.is_rejected == 'on devices'
  assert one.items_seen == 1
  assert one.drops.seen_total == 2


def test_no_batch_in_time_gives_none(make):
  one = make([_item([3])], timeout_s=0.05)
  assert next(one.feed) is None
  one.sampler.items.append(_item([7]))
  one.sampler.items.append(_item([3]))
  deadline_s = time.monotonic() + 10
  while (packed := next(one.feed)) is None:
    assert time.monotonic() < deadline_s
  assert sorted(packed.segments.length) == [3, 3, 7]


def test_what_is_stale_on_arrival_is_dropped_by_cause_and_decile(make):
  stale = _item(
    [1, 2, 3, 7],
    policy_version=[1, 10, 10, 10],
    age_s=[0.0, 0.0, 101.0, 0.0],
  )
  one = make([stale, _item([5, 5], policy_version=4), _item([5])], version=10)
  # Fresh are 2 and 7 of the first item; nothing of the second and third.
  one.sampler.empty.wait(10)
  assert one.drops.by_cause() == {
    'lag': 1 + 2 + 1,
    'age': 1,
    'poison': 0,
    'shutdown': 0,
  }
  deciles = one.drops.by_decile()
  assert deciles.sum() == 5
  assert deciles[0] == 1  # The shortest of all that were seen.
  one.sampler.items.append(_item([4], policy_version=10))
  one.sampler.items.append(_item([4], policy_version=10))
  packed = next(one.feed)
  assert packed is not None
  assert set(packed.segments.length) <= {2, 7, 4}


@pytest.mark.parametrize(('age_s', 'flushed'), [(50.0, False), (85.0, True)])
def test_a_partly_filled_batch_leaves_before_its_data_is_too_old(
  make, age_s, flushed
):
  one = make([_item([3], age_s=age_s)], timeout_s=10.0 if flushed else 0.2)
  packed = next(one.feed)
  assert (packed is not None) == flushed
  if flushed:
    assert packed.segments.length.tolist() == [3]


def test_it_packs_ahead_by_as_much_as_it_is_told(make):
  one = make([_item([7, 7]) for _ in range(20)], prefetch=2)
  deadline_s = time.monotonic() + 10
  while len(one.placed) < 2:
    assert time.monotonic() < deadline_s
    time.sleep(0.005)
  assert not one.sampler.empty.wait(0.3)
  assert (len(one.placed), one.sampler.taken) == (2, 2)
  for _ in range(20):
    assert next(one.feed) is not None
  assert one.sampler.taken == 20


@pytest.mark.parametrize('where', ['sampler', 'place'])
def test_an_error_of_the_thread_reaches_the_learner(make, where):
  cause = ValueError('broken on purpose')

  def place(batch):
    raise cause

  if where == 'sampler':
    one = make([_item([7, 7])], then=cause, prefetch=2, timeout_s=0.5)
    one.sampler.empty.wait(10)
    assert next(one.feed) is not None  # What came before is still learnt.
  else:
    one = make([_item([7, 7])], place=place, timeout_s=0.5)
  with pytest.raises(RuntimeError, match='feed thread') as raised:
    next(one.feed)
  assert raised.value.__cause__ is cause
  with pytest.raises(RuntimeError):
    next(one.feed)


def test_what_the_feed_and_its_sampler_hold_at_the_end_is_counted_once(make):
  one = make([_item([7, 7]) for _ in range(3)] + [_item([1, 2])], prefetch=2)
  one.sampler.held = [_item([4, 5, 6])]
  assert next(one.feed) is not None
  for _ in range(2):
    one.feed.close()
    dropped = one.drops.by_cause()
    assert dropped['shutdown'] >= 3
    assert one.drops.seen_total == 2 + dropped.pop('shutdown')
    assert one.drops.by_decile().sum() == one.drops.seen_total - 2
    assert not any(dropped.values())


def test_an_error_in_the_thread_is_told_at_once(make):
  one = make([], then=ValueError('broken on purpose'), timeout_s=30.0)
  start_s = time.monotonic()
  for _ in range(2):
    with pytest.raises(RuntimeError, match='feed thread'):
      next(one.feed)
  assert time.monotonic() - start_s < 5.0


def test_close_is_prompt_while_the_learner_takes_nothing(make):
  one = make([_item([7, 7]) for _ in range(9)])
  deadline_s = time.monotonic() + 10
  while not one.placed:
    assert time.monotonic() < deadline_s
    time.sleep(0.005)
  start_s = time.monotonic()
  one.feed.close()
  assert time.monotonic() - start_s < 2.0
  assert not one.feed._thread.is_alive()


class _Admission:
  """Lets batches be packed when `go` is set; knows some permits already."""

  def __init__(self, settled=()):
    self.go = threading.Event()
    self.arrived = []
    self.dropped = []
    self.asked = []
    self._settled = set(settled)

  def arrive(self, permit_ids):
    self.arrived += permit_ids.tolist()
    return np.array([i not in self._settled for i in permit_ids.tolist()])

  def settle(self, permit_ids):
    self.dropped += permit_ids.tolist()

  def may_pack(self, pending, *, is_ready):
    self.asked.append((pending, is_ready))
    return pending > 0 and self.go.is_set()


def _one(permit_id, **kwargs):
  return test_utils.trajectories([3], permit_id=permit_id, **kwargs)


def test_with_admission_all_that_comes_is_taken_and_packed_by_permit(make):
  admission = _Admission()
  items = [_one(i) for i in (14, 12, 13, 11, 15)]
  one = make(items, admission=admission, max_trajectories=2)
  assert one.sampler.empty.wait(10.0), 'nothing waits for room'
  assert one.feed._ready.empty()
  assert (5, True) in admission.asked and (1, False) in admission.asked
  admission.go.set()
  batches = [next(one.feed) for _ in range(3)]
  ids = [batch.segments.permit_id.tolist() for batch in batches]
  assert ids == [[11, 12], [13, 14], [15]]


def test_with_admission_what_is_dropped_gives_its_permit_back_once(make):
  admission = _Admission(settled=[12])
  items = [
    _one(11, policy_version=1),  # Stale.
    _one(12, policy_version=1),  # Stale, but told of before.
    _one(13, policy_version=9),
    _one(12, policy_version=9),
  ]
  one = make(items, admission=admission, max_trajectories=2, version=9)
  assert one.sampler.empty.wait(10.0)
  admission.go.set()
  assert next(one.feed).segments.permit_id.tolist() == [13]
  assert admission.arrived == [11, 12, 13, 12]
  assert admission.dropped == [11]
  assert one.drops.by_cause()['lag'] == 1
  assert one.drops.seen_total == 2
