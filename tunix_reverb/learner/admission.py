"""Admission at the learner: gives permits, and holds updates for their sake.

The ledger (`staleness.ledger`) decides; here it meets the world. The feed tells
it what arrives, the learner what it has learnt, and a thread keeps the table of
permits as the ledger wants it. Whatever the server has lost, the thread empties
the table and fills it anew under new ids: at worst a few trajectories more are
under way than were admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import logging
import threading
import time
from typing import Any

import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.staleness import bound as bound_lib
from tunix_reverb.staleness import ledger as ledger_lib
from tunix_reverb.telemetry import drops as drops_lib

_POLL_S = 0.02
_REMOVALS_PERIOD_S = 0.5
_RETRY_S = 0.2

# Ids of permits count in their lower half; the upper one says which learner
# issued them, in quarters of a second since 2025: two start further apart.
_INCARNATION_BITS = 32
_EPOCH_S = 1_735_689_600


def first_permit_id(now_s: float) -> int:
  """Where the permits of a learner that starts at `now_s` begin, seconds."""
  return (int(4 * (now_s - _EPOCH_S)) << _INCARNATION_BITS) + 1


class Admission:
  """Gives permits as trajectories come back, and paces the learner.

  Call `start` once the first variables are published. The methods are grouped
  by the thread that calls them.
  """

  def __init__(
    self,
    table: core.PermitTable,
    *,
    trajectories_per_update: int,
    max_policy_lag: int,
    num_permits: int,
    lease_s: float,
    publish_period: int,
    confirmed_version: Callable[[], int],
    drops: drops_lib.DropCounter,
    on_live_lease: Callable[[], None] = lambda: None,
    waiting: Callable[
      [str], contextlib.AbstractContextManager[None]
    ] = contextlib.nullcontext,
  ):
    """Nothing is issued before `start`.

    Args:
      table: the table of permits, and what was removed from the others.
      trajectories_per_update: as the ledger's, like the next two.
      max_policy_lag: in publishes.
      num_permits: that go round.
      lease_s: seconds after which a taken permit is given to another.
      publish_period: learner steps between publishes.
      confirmed_version: the newest version that actors can get.
      drops: counts what was removed.
      on_live_lease: called while nothing is left to do but to wait for
        somebody who holds a permit: the lease is a deadline of its own.
      waiting: names a wait, as `telemetry.watchdog` does.
    """
    self._table = table
    self._size = trajectories_per_update
    self._max_policy_lag = max_policy_lag
    self._num_permits = num_permits
    self._lease_s = lease_s
    self._publish_period = publish_period
    self._confirmed_version = confirmed_version
    self._drops = drops
    self._on_live_lease = on_live_lease
    self._lock = threading.Lock()
    self._wake = threading.Event()
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(
      target=self._run, name='permits', daemon=True
    )
    self._ledger: Any = None  # A `PermitLedger` from `start` on.
    self._learner_step = 0
    self._unfinished = 0  # Batches packed and not yet learnt.
    self._hold = _HoldClock(waiting)

  def start(self, *, policy_version: int, learner_step: int) -> None:
    """Starts giving permits.

    Args:
      policy_version: the learner's, published.
      learner_step: the learner's.
    """
    self._learner_step = learner_step
    self._ledger = ledger_lib.PermitLedger(
      trajectories_per_update=self._size,
      max_policy_lag=self._max_policy_lag,
      num_permits=self._num_permits,
      lease_s=self._lease_s,
      first_id=first_permit_id(time.time()),
      policy_version=policy_version,
    )
    self._thread.start()

  def close(self, timeout_s: float = 2.0) -> None:
    """Stops giving permits; idempotent."""
    self._stop.set()
    self._wake.set()
    if self._thread.is_alive():
      self._thread.join(timeout_s)

  def metrics(self) -> dict[str, float]:
    """What happened so far, by the names of the metrics."""
    with self._lock:
      counts = self._ledger.counts
      return {
        'permits_untaken': counts.stock,
        'permits_taken': counts.taken,
        'permits_reissued_total': self._ledger.reissued_total,
        'admission_hold_s_total': self._hold.total_s,
      }

  # The feed's thread.

  def arrive(self, permit_ids: np.ndarray) -> np.ndarray:
    """Trajectories have come: which of them are news, bool [N].

    The others came before, or were reported as removed.

    Args:
      permit_ids: i64 [N].
    """
    self._raise_error()
    now_s = time.monotonic()
    settled = ledger_lib.Arrival.SETTLED
    with self._lock:
      return np.array(
        [
          self._ledger.arrive(permit_id, now_s) is not settled
          for permit_id in permit_ids.tolist()
        ],
        np.bool_,
      )

  def settle(self, permit_ids: np.ndarray) -> None:
    """Trajectories that came are dropped: their permits come back, i64 [N]."""
    if permit_ids.size:
      with self._lock:
        self._ledger.settle(permit_ids.tolist())
      self._wake.set()

  def may_pack(self, pending: int, *, is_ready: bool) -> bool:
    """Whether a batch may be packed of what is pending.

    Not while something could still come that belongs into it: it would be
    stale after the update.

    Args:
      pending: trajectories pending.
      is_ready: whether they are enough for a batch.
    """
    self._raise_error()
    with self._lock:
      ledger = self._ledger
      enough = pending > 0 and (is_ready or ledger.is_all_in)
      holds = pending > 0 and ledger.holds(self._publishes_ahead())
      waits = bool(ledger.counts.taken) and not self._unfinished
      self._hold.tick(self._describe_hold() if holds and waits else '')
      packs = enough and not holds
      self._unfinished += packs
    if waits:
      self._on_live_lease()
    return packs

  def _publishes_ahead(self) -> int:
    """Publishes up to the one after the batch that would be packed next."""
    step, period = self._learner_step, self._publish_period
    return (step + self._unfinished + 1) // period - step // period

  def _describe_hold(self) -> str:
    return (
      f'learner holds its next update for {self._ledger.counts.taken} '
      f'trajectories, begun from version {self._ledger.oldest_version()} on'
    )

  # The learner's thread.

  def finish(
    self, permit_ids: np.ndarray, *, learner_step: int, publish: bool
  ) -> bool:
    """A batch was learnt, or dropped: its permits come back.

    Args:
      permit_ids: i64 [N], of the batch.
      learner_step: the learner's, now.
      publish: whether the learner would publish its next version now.

    Returns:
      Whether it may, and has to: everything under way can still be learnt
      then.
    """
    with self._lock:
      self._unfinished -= 1
      self._learner_step = learner_step
      self._ledger.settle(permit_ids.tolist())
      may_publish = publish and self._ledger.advance()
    self._wake.set()
    return may_publish

  # Its own thread.

  def _run(self) -> None:
    keeper = _StockKeeper(self._table, self._ledger, self._lock)
    next_removals_s, trouble = 0.0, ''
    try:
      while not self._stop.is_set():
        pause_s = _POLL_S
        try:
          keeper.keep(self._confirmed_version())
          if time.monotonic() >= next_removals_s:
            next_removals_s = time.monotonic() + _REMOVALS_PERIOD_S
            self._count_removals(self._table.removals())
          trouble = ''
        except (
          errors.DeadlineExceededError,
          errors.ReplayUnavailableError,
        ) as e:
          if not trouble:  # Once for each outage.
            logging.warning('permits: %s; trying again', e)
          trouble, pause_s = str(e), _RETRY_S
        self._wake.wait(pause_s)
        self._wake.clear()
    except BaseException as e:  # Raised again in the feed's thread.
      self._error = e

  def _count_removals(self, removals: Sequence[types.Removal]) -> None:
    now_s = time.monotonic()
    for removal in removals:
      with self._lock:
        is_news = self._ledger.remove(removal.permit_id, now_s)
      if is_news and removal.cause != bound_lib.FRESH:
        length = np.array([removal.length], np.int32)
        self._drops.see(length)
        self._drops.drop(bound_lib.CAUSES[removal.cause], length)

  def _raise_error(self) -> None:
    if self._error is not None:
      raise RuntimeError('giving permits failed') from self._error


class _StockKeeper:
  """Keeps the table of permits as the ledger's stock says.

  A call that fails leaves open what the server has done of it. The next round
  sees from the table's counters whether all is as it should be, and starts the
  table anew if not: so it does at first.
  """

  def __init__(
    self,
    table: core.PermitTable,
    ledger: ledger_lib.PermitLedger,
    lock: threading.Lock,
  ):
    self._table = table
    self._ledger = ledger
    self._lock = lock
    # Since the table was reset; -1 before it ever was.
    self._inserts = -1
    self._deletes = 0
    self._taken_before = 0

  def keep(self, confirmed_version: int) -> None:
    """Learns what was taken, gives up leases, and brings the stock up."""
    ledger = self._ledger
    with self._lock:
      ledger.confirm(confirmed_version)
    if not self._observe():
      self._reset()
    if ledger.stock_is_outdated and not self._withdraw():
      self._reset()
    with self._lock:
      ledger.expire(time.monotonic())
      permits = ledger.issue()
    if permits:
      self._inserts += len(permits)  # If this fails, the next round sees it.
      self._table.insert(permits)

  def _observe(self) -> bool:
    """Learns what was taken; returns whether the table is as we left it."""
    state = self._table.state()
    if state.inserts != self._inserts:
      return False  # Another server, or an older state of it.
    taken = self._taken_before + state.samples
    with self._lock:
      self._ledger.observe_taken(taken, time.monotonic())
    return state.size == state.inserts - state.samples - self._deletes

  def _withdraw(self) -> bool:
    """Deletes the stock; returns whether nothing is left in the table."""
    with self._lock:
      permit_ids = self._ledger.stock_ids
    self._table.delete(permit_ids)
    state = self._table.state()
    if state.inserts != self._inserts or state.size:
      return False
    taken = self._taken_before + state.samples
    with self._lock:
      self._ledger.observe_taken(taken, time.monotonic())
      self._ledger.withdraw()
    self._deletes = state.inserts - state.samples
    return True

  def _reset(self) -> None:
    self._table.reset()
    with self._lock:
      self._ledger.doubt(time.monotonic())
      self._ledger.withdraw()
      self._taken_before = self._ledger.taken_total
    self._inserts = self._deletes = 0


class _HoldClock:
  """Adds up how long updates are held, and names the wait while they are."""

  def __init__(
    self, waiting: Callable[[str], contextlib.AbstractContextManager[None]]
  ):
    self._waiting = waiting
    self._wait = contextlib.ExitStack()
    self._since_s: float | None = None
    self.total_s = 0.0

  def tick(self, what: str) -> None:
    """Says what is waited for now; nothing if empty."""
    now_s = time.monotonic()
    if self._since_s is not None:
      self.total_s += now_s - self._since_s
    if what and self._since_s is None:
      self._wait.enter_context(self._waiting(what))
    elif not what:
      self._wait.close()
    self._since_s = now_s if what else None
