"""Learner processes, here threads: what they agree on, and no wait in vain."""

import collections
import dataclasses
import threading
import time
import types as python_types

import jax
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.batching import buckets as buckets_lib
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.learner import group as group_lib
from tunix_reverb.learner import group_feed
from tunix_reverb.learner import learner as learner_lib
from tunix_reverb.learner import test_utils
from tunix_reverb.staleness import bound as bound_lib
from tunix_reverb.telemetry import drops as drops_lib
from tunix_reverb.telemetry import metrics

_BUCKETS = buckets_lib.make_buckets((4, 16), batch_positions=32)
_SHORT, _LONG = (3,) * 8, (15,) * 2  # Each fills a batch of its bucket.
_BOUND = bound_lib.StalenessBound(max_policy_lag=5, max_age_s=100.0)


class _Threads:
  """An exchange between threads, and a stand-in for a collective."""

  def __init__(self, size):
    self._barrier = threading.Barrier(size)
    self._words = [None] * size

  def exchange(self, index, words):
    self._words[index] = dict(words)
    self._barrier.wait(20)
    everything = [dict(words) for words in self._words]
    self._barrier.wait(20)
    return everything

  def collective(self, index, shape):
    """What devices would do: wait for the others, for the same program."""
    assert self.exchange(index, {'shape': shape}) == [
      {'shape': shape} for _ in self._words
    ]


class _Exchange:
  def __init__(self, index, size, threads):
    self.index, self.size = index, size
    self._threads = threads

  def __call__(self, words):
    return self._threads.exchange(self.index, words)


class _Sampler(core.ItemSampler):
  """Hands out items; in the end there are none."""

  def __init__(self, items):
    self._items = collections.deque(items)

  def sample(self, timeout_s):
    if self._items:
      return types.SampledItem(0, 0.0, 1, self._items.popleft())
    time.sleep(0.001)
    return None

  def close(self):
    return []


class _Process:
  """One of the learner processes."""

  def __init__(self, index, size, threads, items, place=lambda batch: batch):
    self.index = index
    self.threads = threads
    self.group = group_lib.Group(_Exchange(index, size, threads))
    self.drops = drops_lib.DropCounter(metrics.DROP_CAUSES)
    self.batches = []
    self.feed = group_feed.GroupFeed(
      _Sampler(items),
      packer_lib.Packer(
        buckets=_BUCKETS,
        columns=specs.trajectories_spec(test_utils.SPEC),
        window=1.0,
      ),
      bound=_BOUND,
      drops=self.drops,
      place=place,
      learner_version=lambda: 1,
      prefetch_batches=1,
      group=self.group,
    )

  def take(self, stop):
    """Takes batches until some process wants to stop; `stop(self)` says."""
    self.group.vote('stop', lambda: stop(self))
    self.feed.start()
    for packed in self.feed:
      if packed is not None:
        self.threads.collective(self.index, packed.bucket)
        self.batches.append(packed)
    self.feed.close()

  @property
  def lengths(self):
    return [sorted(b.segments.length.tolist()) for b in self.batches]


def _run(work, processes):
  """Runs work(process) in a thread each; raises what any of them raised."""
  failures = []

  def guarded(process):
    try:
      work(process)
    except BaseException as e:
      failures.append(e)

  threads = [
    threading.Thread(target=guarded, args=(process,)) for process in processes
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  if failures:
    raise failures[0]


def _items(*lengths, **kwargs):
  return [
    test_utils.trajectories(x, seed=seed, **kwargs)
    for seed, x in enumerate(lengths)
  ]


def _take(*items, stop):
  threads = _Threads(len(items))
  processes = [
    _Process(i, len(items), threads, own) for i, own in enumerate(items)
  ]
  _run(lambda process: process.take(stop), processes)
  return processes


@pytest.mark.parametrize(
  'wishes, ready, flush, expected',
  [
    ([0, 0], [1, 1], [0, 0], 0),
    ([0, 1], [1, 1], [0, 0], 1),  # Who has only short ones packs long rows.
    ([0, 1], [1, 0], [0, 0], -1),
    ([0, 1], [1, 0], [1, 0], 1),
    ([0, -1], [1, 0], [1, 0], 0),  # The other one's rows are all padding.
    ([-1, -1], [0, 0], [0, 0], -1),
  ],
)
def test_the_bucket_is_the_smallest_that_suits_all(
  wishes, ready, flush, expected
):
  assert group_feed.choose_bucket(wishes, ready, flush) == expected


def test_one_process_has_only_short_rows_and_one_only_long_ones():
  short, long = _take(
    _items(*[_SHORT] * 6),
    _items(*[_LONG] * 6),
    stop=lambda process: len(process.batches) >= 5,
  )
  assert [b.bucket for b in short.batches] == [16] * 5
  assert [b.bucket for b in long.batches] == [16] * 5
  assert short.lengths == [[3] * 8] * 5  # Full: four to a row.
  assert long.lengths == [[15] * 2] * 5


def test_where_all_are_short_the_short_bucket_is_used():
  processes = _take(
    _items(*[(3,) * 10] * 6),
    _items(*[(3,) * 10] * 6),
    stop=lambda process: len(process.batches) >= 4,
  )
  for process in processes:
    assert [b.bucket for b in process.batches] == [4] * 4


def test_who_has_nothing_holds_up_nobody(monkeypatch):
  monkeypatch.setattr(group_feed, '_PATIENCE_S', 0.1)
  full, dry = _take(
    _items(*[_SHORT] * 4),
    _items((15,)),
    stop=lambda process: process.index == 0 and len(process.batches) >= 4,
  )
  assert full.lengths == [[3] * 8] * 4
  assert [x for batch in dry.lengths for x in batch] == [15]
  (empty, *_) = (b for b in dry.batches if not b.segments.length.size)
  assert not empty.batch.segment_ids.any()
  assert empty.batch.segment_ids.shape == (
    32 // empty.bucket,
    empty.bucket,
  )


def test_what_is_near_its_age_is_flushed_by_all():
  old, young = _take(
    _items((3, 3), age_s=81.0),
    _items((3,)),
    stop=lambda process: len(process.batches) >= 1,
  )
  assert old.lengths == [[3, 3]]
  assert young.lengths in ([[3]], [[]])


def test_all_stop_at_the_same_batch_when_one_wants_to():
  one, other = _take(
    _items(*[_SHORT] * 8),
    _items(*[_SHORT] * 8),
    stop=lambda process: process.index == 1 and len(process.batches) >= 3,
  )
  assert len(one.batches) == len(other.batches) == 3
  for process in (one, other):
    learnt = sum(len(x) for x in process.lengths)
    assert process.drops.by_cause()['shutdown'] + learnt == (
      process.drops.seen_total
    )


@dataclasses.dataclass
class _Publisher:
  """Publishes at once, but is found busy once after each version."""

  versions: list = dataclasses.field(default_factory=list)
  busy: bool = False

  @property
  def idle(self):
    was_busy, self.busy = self.busy, False
    return not was_busy

  def offer(self, variables):
    self.versions.append(variables.policy_version)
    self.busy = True


def _learner(process, publisher):
  """A learner whose update is a stand-in for a collective."""

  def update(state, batch):
    process.threads.collective(process.index, batch.segment_ids.shape[1])
    process.rejected.append(int(batch.is_rejected.sum()))
    state.learner_step = state.learner_step + 1
    return state, {'loss': np.float32(0)}

  process.rejected = []
  return learner_lib.PackedLearner(
    state=python_types.SimpleNamespace(
      learner_step=0, params={'w': np.zeros(2)}, non_finite_total=0
    ),
    updates={bucket.length: update for bucket in _BUCKETS},
    batches=process.feed.start(),
    bound=_BOUND,
    drops=process.drops,
    publisher=publisher,
    limits=learner_lib.RunLimits(report_period_s=0.0),
    group=process.group,
    policy_version=6,
    on_report=lambda metrics, step: process.reports.append((step, metrics)),
  )


def test_learners_update_publish_and_report_together():
  both = lambda batch: jax.tree_util.tree_map(
    lambda x: np.concatenate([x, x]), batch
  )
  threads = _Threads(2)
  # The feed's version is 1: what the learner, at 6 and more, rejects.
  fresh, stale = (
    _Process(0, 2, threads, _items(*[_SHORT] * 9, policy_version=8), both),
    _Process(1, 2, threads, _items(*[_SHORT] * 9, policy_version=0), both),
  )
  publisher, learners = _Publisher(), {}

  def work(process):
    process.reports = []
    learner = _learner(process, publisher if process.index == 0 else None)
    learners[process.index] = learner
    learner.run(6)
    process.group.agree()
    process.feed.close()

  _run(work, [fresh, stale])
  assert learners[0].learner_step == learners[1].learner_step == 6
  assert publisher.versions == list(range(7, 7 + len(publisher.versions)))
  # After each version it is skipped at most once, for the processes ask it
  # before every step and more often while there is nothing to learn.
  assert 3 <= len(publisher.versions) <= 6
  assert learners[0].policy_version == learners[1].policy_version
  assert [step for step, _ in fresh.reports] == [s for s, _ in stale.reports]
  assert fresh.rejected == [0] * 6
  assert stale.rejected == [24] * 6  # All it has, and it takes part.
  assert fresh.reports[-1][1]['transitions_total'] == 6 * 24
  fills = [values.get('batch_fill') for _, values in fresh.reports]
  assert set(fills) <= {1.0, None} and 1.0 in fills


def test_a_failed_collective_is_told_as_a_lost_process():
  group = group_lib.Group(_Exchange(1, 3, None))
  with pytest.raises(errors.PeerLostError, match=r'process 1 of 3.*closed'):
    with group.computing():
      raise RuntimeError('Gloo: connection closed by peer\nand more')
  with pytest.raises(RuntimeError, match='out of memory'):
    with group_lib.Group().computing():
      raise RuntimeError('out of memory')
