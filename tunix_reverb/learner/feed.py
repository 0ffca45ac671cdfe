"""Feeds the learner: items in, packed batches on the mesh out.

One thread samples items, drops what is too old, packs, and places the batch on
the devices, while the learner computes. It packs ahead by `prefetch_batches`
only: data that waits in the table keeps its order there, data that waits here
ages. With admission it takes whatever arrives, since updates may be held for
it; then the permits bound what waits here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import queue
import threading
import time
from typing import Any

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.learner import admission as admission_lib
from tunix_reverb.staleness import bound as bound_lib
from tunix_reverb.telemetry import drops as drops_lib

# A partly filled batch is made when its oldest trajectory has used up this
# fraction of max_age_s, so that the rest is left for placing and learning it.
_FLUSH_AGE_FRACTION = 0.8
_POLL_S = 0.05
_ADMISSION_POLL_S = 0.01


class Feed(Iterator[types.PackedBatch | None]):
  """An iterator of packed batches; yields None when none came in time."""

  def __init__(
    self,
    sampler: core.ItemSampler,
    packer: packer_lib.Packer,
    *,
    bound: bound_lib.StalenessBound,
    drops: drops_lib.DropCounter,
    place: Callable[[types.Batch], types.Batch],
    learner_version: Callable[[], int],
    prefetch_batches: int,
    timeout_s: float = 1.0,
    on_item: Callable[[], None] = lambda: None,
    admission: admission_lib.Admission | None = None,
  ):
    """Reads from `sampler` once `start` is called.

    Args:
      sampler: where items come from.
      packer: packs them.
      bound: older trajectories are dropped on arrival.
      drops: counts what is seen and dropped.
      place: puts a host batch on the devices.
      learner_version: the version that the learner published last.
      prefetch_batches: batches packed and placed ahead.
      timeout_s: longest wait of `__next__`, seconds.
      on_item: called for every item, as a sign of progress.
      admission: says when a batch may be packed; None packs what there is.
    """
    self._sampler = sampler
    self._packer = packer
    self._bound = bound
    self._drops = drops
    self._place = place
    self._learner_version = learner_version
    self._timeout_s = timeout_s
    self._on_item = on_item
    self._admission = admission
    # None comes last, from a thread that has failed.
    self._ready: queue.Queue[types.PackedBatch | None] = queue.Queue(
      prefetch_batches
    )
    self._room = threading.Condition()
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name='feed', daemon=True)

  def start(self) -> Feed:
    """Starts the thread."""
    self._thread.start()
    return self

  def close(self, timeout_s: float = 2.0) -> None:
    """Stops thread and sampler; idempotent.

    What they hold is counted as dropped at shutdown.
    """
    if self._stop.is_set():
      return
    self._stop.set()
    with self._room:
      self._room.notify_all()
    if self._thread.is_alive():
      self._thread.join(timeout_s)
    self._drops.drop('shutdown', self._packer.pending_lengths)
    while not self._ready.empty():
      packed = self._ready.get_nowait()
      if packed is not None:
        self._drops.drop('shutdown', packed.segments.length)
    for item in self._sampler.close():
      self._drops.see(item.trajectories.lengths)
      self._drops.drop('shutdown', item.trajectories.lengths)

  def __next__(self) -> types.PackedBatch | None:
    """The next batch, or None after `timeout_s`.

    Raises:
      RuntimeError: the feed's thread failed; the cause is chained.
    """
    has_ended = self._error is not None
    try:
      batch = self._ready.get(timeout=0.0 if has_ended else self._timeout_s)
    except queue.Empty:
      if has_ended:
        raise RuntimeError('the feed thread failed') from self._error
      return None
    if batch is None:
      raise RuntimeError('the feed thread failed') from self._error
    with self._room:
      self._room.notify_all()
    return batch

  def _run(self) -> None:
    try:
      while not self._stop.is_set():
        if self._admission is not None:
          self._emit(self._pop_admitted(self._admission))
          self._take(self._sampler.sample(_ADMISSION_POLL_S))
          continue
        self._wait_for_room()
        self._emit(self._packer.pop(flush=self._must_flush()))
        if not self._ready.full():
          self._take(self._sampler.sample(_POLL_S))
    except BaseException as e:  # Raised again in the learner's thread.
      self._error = e
      self._hand_over(None)

  def _wait_for_room(self) -> None:
    with self._room:
      self._room.wait_for(
        lambda: not self._ready.full() or self._stop.is_set(), timeout=1.0
      )

  def _pop_admitted(
    self, admission: admission_lib.Admission
  ) -> types.PackedBatch | None:
    if self._ready.full() or not admission.may_pack(
      self._packer.pending_lengths.size,
      is_ready=self._packer.is_ready or self._must_flush(),
    ):
      return None
    return self._packer.pop(flush=True)

  def _must_flush(self) -> bool:
    oldest_s = self._packer.oldest_created_at_s()
    if oldest_s is None:
      return False
    age_s = time.time() - oldest_s
    return age_s > _FLUSH_AGE_FRACTION * self._bound.max_age_s

  def _emit(self, packed: types.PackedBatch | None) -> None:
    if packed is None:
      return
    packed = dataclasses.replace(packed, batch=self._place(packed.batch))
    if not self._hand_over(packed):
      self._drops.drop('shutdown', packed.segments.length)

  def _hand_over(self, packed: types.PackedBatch | None) -> bool:
    """Waits for room in the queue; returns whether there was any."""
    while not self._stop.is_set():
      try:
        self._ready.put(packed, timeout=_POLL_S)
        return True
      except queue.Full:
        continue
    return False

  def _take(self, item: types.SampledItem | None) -> None:
    if item is None:
      return
    self._on_item()
    trajectories = item.trajectories
    causes = self._bound.causes(
      packer_lib.minimum_versions(trajectories),
      trajectories.created_at_s,
      learner_version=self._learner_version(),
      now_s=time.time(),
    )
    lengths, keep = trajectories.lengths, causes == bound_lib.FRESH
    if self._admission is not None:
      is_news = self._admission.arrive(trajectories.permit_id)
      self._admission.settle(trajectories.permit_id[is_news & ~keep])
      lengths, causes, keep = lengths[is_news], causes[is_news], keep & is_news
    self._drops.see(lengths)
    count_drops(self._drops, causes, lengths)
    self._packer.add(trajectories, keep)


def count_drops(
  drops: drops_lib.DropCounter, causes: Any, lengths: Any
) -> None:
  """Counts the stale of `lengths` i32 [N] by their `causes` i8 [N]."""
  if causes.any():
    for code, cause in bound_lib.CAUSES.items():
      drops.drop(cause, lengths[causes == code])
