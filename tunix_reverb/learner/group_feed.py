"""The feed of one of several learner processes: all batches of one shape.

Each process samples and packs rows of its own, and all agree on the bucket of a
batch before any of them packs it. It is packed and placed while the devices
compute the update before it.
"""

from __future__ import annotations

from collections.abc import Sequence
import queue
import time
from typing import Any

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.learner import feed
from tunix_reverb.learner import group as group_lib

# A process whose batch is full waits so long for the others, whose batches are
# then made of what they have: data that waits ages.
_PATIENCE_S = 1.0
# Between two questions to the others while nothing is there to learn.
_PAUSE_S = 0.01
_POLL_S = 0.05
_PACKING_DEADLINE_S = 20.0


def choose_bucket(
  wishes: Sequence[int], ready: Sequence[int], flush: Sequence[int]
) -> int:
  """The bucket that every process packs next, an index; -1 for none yet.

  It is the smallest that takes the oldest trajectory of each process. Whoever
  is ready can fill larger buckets than it wished for, too.

  Args:
    wishes: by process, the bucket it would pack; -1 if it has nothing.
    ready: by process, whether it has enough for a whole batch.
    flush: by process, whether it must not wait any longer.
  """
  return max(wishes) if all(ready) or any(flush) else -1


class GroupFeed(feed.Feed):
  """A `Feed` whose `__next__` all processes must call equally often."""

  def __init__(self, *args: Any, group: group_lib.Group, **kwargs: Any):
    """Takes what `Feed` takes, but no admission, and the group."""
    super().__init__(*args, **kwargs)
    self._group = group
    self._orders: queue.Queue[int] = queue.Queue(1)
    self._is_ordered = False  # Whether a batch is being packed, or was.
    self._was_idle = False
    self._ready_since_s: float | None = None
    # What this process would pack next; written by the feed's thread.
    self._wish, self._is_ready, self._is_urgent = -1, False, False
    self._looked_s = 0.0
    group.vote('bucket', lambda: self._wish)
    group.vote('is_ready', lambda: self._is_ready)
    group.vote('flush', self._votes_to_flush)

  def __next__(self) -> types.PackedBatch | None:
    """The batch agreed on before, while the next one is agreed on and packed.

    Raises:
      StopIteration: a process votes for `stop`.
      RuntimeError: the feed's thread failed; the cause is chained.
      errors.PeerLostError: another process did not call in time.
    """
    packed = self._ordered_batch() if self._is_ordered else None
    if self._was_idle:
      time.sleep(_PAUSE_S)
    self._group.agree()
    if self._error is not None:
      raise RuntimeError('the feed thread failed') from self._error
    if self._group.any('stop'):
      if packed is not None:
        self._drops.drop('shutdown', packed.segments.length)
      raise StopIteration
    bucket = choose_bucket(
      self._group.all('bucket'),
      self._group.all('is_ready'),
      self._group.all('flush'),
    )
    self._is_ordered = bucket >= 0
    if self._is_ordered:
      self._orders.put_nowait(bucket)
    self._was_idle = packed is None and not self._is_ordered
    return packed

  def _ordered_batch(self) -> types.PackedBatch:
    try:
      packed = self._ready.get(timeout=_PACKING_DEADLINE_S)
    except queue.Empty as e:
      raise errors.DeadlineExceededError(
        f'learner waited {_PACKING_DEADLINE_S:g} s for its feed to pack a batch'
      ) from e
    if packed is None:
      raise RuntimeError('the feed thread failed') from self._error
    return packed

  def _votes_to_flush(self) -> bool:
    since_s = self._ready_since_s
    if since_s is not None and time.monotonic() - since_s > _PATIENCE_S:
      return True
    return self._is_urgent and self._wish >= 0

  def _run(self) -> None:
    try:
      while not self._stop.is_set():
        bucket = self._next_order()
        if bucket >= 0:
          packed = self._packer.pop_bucket(bucket)
          self._look(is_new=True)  # Before anybody can ask for the next one.
          self._emit(packed)
          continue
        if not self._packer.is_ready:
          self._take(self._sampler.sample(_POLL_S))
        self._look()
    except BaseException as e:  # Raised again in the learner's thread.
      self._error = e
      self._hand_over(None)

  def _next_order(self) -> int:
    """Waits for an order only while there is nothing else to do."""
    try:
      if self._packer.is_ready:
        return self._orders.get(timeout=_POLL_S)
      return self._orders.get_nowait()
    except queue.Empty:
      return -1

  def _look(self, *, is_new: bool = False) -> None:
    """Brings up to date what this process votes for.

    Not after every item: looking takes time that grows with what is pending.

    Args:
      is_new: whether a batch was packed since.
    """
    now_s, is_ready = time.monotonic(), self._packer.is_ready
    if is_new or not is_ready:
      self._ready_since_s = None
    if is_ready and self._ready_since_s is None:
      self._ready_since_s = now_s
    elif not is_new and now_s - self._looked_s < _POLL_S:
      return
    self._looked_s = now_s
    self._is_urgent = self._must_flush()
    self._wish = self._packer.next_bucket()
    self._is_ready = is_ready
