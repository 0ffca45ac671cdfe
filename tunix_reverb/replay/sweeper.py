"""Removes what is too old from a trajectory table whose balance permits keep.

The sweeper knows of every item by its entry (`entries.Entry`): it takes the
announcements, and whatever it may have missed it finds in the index, where an
entry stays until its item is out of the table. So a sweeper may die at any
moment and the next one goes on. For what is too old it
  1. deletes the items by key,
  2. tells the learner, through `tables.REMOVED`, and
  3. deletes the entries from the index;
after a death between two of these the next sweeper does all three again.

An item may have been sampled, and be gone, before it became too old. A delete
does not say; but the counts of the table say whether a delete removed anything
at all, and if not there is nothing to tell.

The server carries out the inserts of one request in one thread per table, so
that an announcement may be read a moment before its item is in the table. So
each sweep deletes a key again until its entry has been known for `settle_s`.

The index would grow to one item per trajectory, and the next sweeper reads it
item by item. So entries are laid together, many in one item, as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import logging
import secrets
import threading
import time
from typing import Any

import numpy as np

from tunix_reverb import errors
from tunix_reverb.replay import checkpoint_items
from tunix_reverb.replay import entries as entries_lib
from tunix_reverb.replay import entry_set
from tunix_reverb.replay import index_reader
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.replay.wire_client import sample_stream
from tunix_reverb.staleness import bound as bound_lib

_UNAVAILABLE = (errors.ReplayUnavailableError, errors.DeadlineExceededError)
_CALL_TIMEOUT_S = 10.0
# A server that fails the sweeper for so long will not come round.
_GIVE_UP_S = 60.0

# Of one delete, which holds up the table for a microsecond or two each.
_KEYS_PER_CALL = 10_000
_ITEMS_PER_CALL = 10_000
_ENTRIES_PER_ITEM = 10_000

# As many loose entries of the index are laid together.
_LOOSE_ENTRIES = 256

# Share of the time between two sweeps that may go into reading the index.
_READING_FRACTION = 0.5
# Least time between two readings because the index holds unknown entries.
_READING_PERIOD_S = 10.0


class Sweeper:
  """Sweeps the trajectory table of one server, in a thread once started.

  `sweep` may be called by hand instead, but not from two threads.
  """

  def __init__(
    self,
    address: str,
    *,
    bound: bound_lib.StalenessBound,
    period_s: float = 1.0,
    settle_s: float = 30.0,
    restored: checkpoint_items.CheckpointItems | None = None,
  ):
    """Connects; does nothing to the server yet.

    Args:
      address: 'host:port' of the server.
      bound: what is too old.
      period_s: seconds from sweep to sweep.
      settle_s: seconds in which the server surely carries out an insert that
        it has accepted.
      restored: of the checkpoint that the server restored; the sweeper closes
        it.
    """
    self._bound = bound
    self._period_s = period_s
    self._settle_s = settle_s
    self._restored = restored
    self._known = entry_set.EntrySet()
    self._channel = connection.open_channel(address)
    self._inserter = insert_stream.Inserter(address)
    self._announcements = sample_stream.Puller(address, tables.ANNOUNCEMENTS)
    self._versions = sample_stream.Puller(address, tables.POLICY_VERSION)
    self._index = index_reader.IndexReader(
      address, self._channel, timeout_s=_CALL_TIMEOUT_S
    )
    self._read_at_s = time.monotonic()
    self._swept = dict.fromkeys(bound_lib.CAUSES, 0)
    self._last_sweep_s = 0.0
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(
      target=self._run, daemon=True, name=f'sweeper of {address}'
    )

  def start(self) -> Sweeper:
    """Starts the thread."""
    self._thread.start()
    return self

  def close(self, timeout_s: float = 2.0) -> None:
    """Ends the thread and the connections; idempotent."""
    self._stop.set()
    if self._thread.is_alive():
      self._thread.join(timeout_s)
    if self._restored is not None:
      self._restored.close()
    for thing in (
      self._announcements,
      self._versions,
      self._index,
      self._inserter,
      self._channel,
    ):
      thing.close()

  def metrics(self) -> dict[str, float]:
    """The sweeper's state, by the names of the metrics.

    Raises:
      RuntimeError: the thread failed; the cause is chained.
    """
    if self._error is not None:
      raise RuntimeError('the sweeper failed') from self._error
    swept = {
      f'swept_{cause}_total': self._swept[code]
      for code, cause in bound_lib.CAUSES.items()
    }
    return {
      **swept,
      'sweep_entries': len(self._known),
      'sweep_s': self._last_sweep_s,
    }

  def sweep(self) -> None:
    """Removes what is too old now.

    Raises:
      ValueError: the table's balance is not kept by permits.
      errors.ReplayUnavailableError, errors.DeadlineExceededError: the server
        did not answer; the next sweep goes on where this one ended.
    """
    began_s = time.monotonic()
    infos = admin.info(self._channel, _CALL_TIMEOUT_S)
    _check_balance(infos[tables.TRAJECTORIES].rate_limiter_info)
    self._learn(infos, began_s)
    known = self._known
    causes = known.causes(
      self._bound,
      learner_version=self._learner_version(infos),
      now_s=time.time(),
    )
    stale = causes != bound_lib.FRESH
    if stale.any():
      for cause in bound_lib.CAUSES:
        self._remove(causes == cause, cause)
      self._forget(stale & (known.known_since_s <= began_s - self._settle_s))
    self._last_sweep_s = time.monotonic() - began_s

  def _run(self) -> None:
    """Sweeps by period; a server that fails for long is one that failed."""
    answered_s = due_s = time.monotonic()
    try:
      while not self._stop.wait(max(0.0, due_s - time.monotonic())):
        due_s = time.monotonic() + self._period_s
        try:
          self.sweep()
          answered_s = time.monotonic()
        except _UNAVAILABLE as e:
          if time.monotonic() - answered_s > _GIVE_UP_S:
            raise
          if not self._stop.is_set():
            logging.warning('a sweep was not completed: %s', e)
    except BaseException as e:  # Raised again by `metrics`.
      if not self._stop.is_set():
        self._error = e

  def _learn(self, infos: Mapping[str, Any], now_s: float) -> None:
    """Takes in what there is to know since the last sweep."""
    self._take_announcements(infos[tables.ANNOUNCEMENTS].current_size, now_s)
    index = infos[tables.INDEX]
    if (
      not self._index.reading
      and index.current_size > len(self._known.holders)
      and now_s - self._read_at_s > _READING_PERIOD_S
    ):
      self._index.begin(self._known.holders)
    if self._index.reading:
      self._read_index(index, now_s)
    if self._restored is not None and not self._index.reading:
      self._index_missing(self._restored, now_s)
    loose = self._known.loose
    if loose.sum() >= _LOOSE_ENTRIES:
      self._lay_together(loose)

  def _take_announcements(self, number: int, now_s: float) -> None:
    """Takes `number` announcements, which nobody else takes."""
    while number > 0:
      count = min(number, _ITEMS_PER_CALL)
      number -= count
      self._announcements.poison.clear()
      try:
        items = self._announcements.pull(count, _CALL_TIMEOUT_S)
      except _UNAVAILABLE:
        self._index.begin(self._known.holders)
        raise
      poison = [key for key in self._announcements.poison if key is not None]
      held = [(i.key, index_reader.decode(i.columns)) for i in items]
      self._known.add(held, now_s=now_s)
      self._index.see(key for key, _ in held)
      self._drop_unreadable(poison + [key for key, found in held if not found])
      if len(items) + len(self._announcements.poison) < count:
        # Taken, and lost on the way; the index has them all.
        self._index.begin(self._known.holders)
        return

  def _read_index(self, info: Any, now_s: float) -> None:
    deadline_s = now_s + _READING_FRACTION * self._period_s
    try:
      found = self._index.read(info, deadline_s)
    except _UNAVAILABLE:
      self._index.begin(self._known.holders)
      raise
    # A sweeper before this one may have removed their items, untold.
    self._known.add(found, now_s=now_s, doubtful=True)
    holders = self._known.holders
    self._delete(tables.INDEX, [i.key for i in found if i.key not in holders])
    self._drop_unreadable([item.key for item in found if not item.entries])
    self._read_at_s = time.monotonic()

  def _index_missing(
    self, restored: checkpoint_items.CheckpointItems, now_s: float
  ) -> None:
    """Indexes restored items whose entries were not in the checkpoint."""
    missing = restored.missing_entries(self._known)
    for i in range(0, len(missing), _ENTRIES_PER_ITEM):
      entries = missing[i : i + _ENTRIES_PER_ITEM]
      holder = self._insert_into_index(entries)
      self._known.add([(holder, entries)], now_s=now_s, doubtful=True)
    restored.close()
    self._restored = None

  def _lay_together(self, loose: np.ndarray) -> None:
    """Puts the entries of `loose`, bool [N], into one item of the index."""
    keys = self._known.keys[loose].tolist()
    holder = self._insert_into_index(self._known.entries(loose))
    self._known.move(loose, holder)
    self._delete(tables.INDEX, keys)

  def _insert_into_index(self, entries: Sequence[entries_lib.Entry]) -> int:
    """Inserts one item of all `entries`. Returns its key."""
    key = secrets.randbits(64)
    priority = max(0, min(entry.policy_version for entry in entries))
    item = insert_stream.NewItem(
      [(tables.INDEX, key, float(priority))],
      entries_lib.encode_entries(entries),
    )
    self._inserter.insert([item], _CALL_TIMEOUT_S)
    self._index.see([key])
    return key

  def _drop_unreadable(self, keys: Sequence[int]) -> None:
    """An item whose entry cannot be read would stay for ever."""
    if keys:
      logging.warning(
        '%d entries cannot be read; their items are removed, such as %d',
        len(keys),
        keys[0],
      )
      self._delete(tables.TRAJECTORIES, keys)
      self._delete(tables.INDEX, keys)

  def _learner_version(self, infos: Mapping[str, Any]) -> int:
    """The version that the learner published last; 0 before the first one."""
    if not infos[tables.POLICY_VERSION].current_size:
      return 0
    items = self._versions.pull(1, _CALL_TIMEOUT_S)
    if not items:
      raise errors.DeadlineExceededError(
        f'the policy version did not come within {_CALL_TIMEOUT_S:g} s'
      )
    return int(items[0].priority)

  def _remove(self, mask: np.ndarray, cause: int) -> None:
    """Removes the items of `mask`, bool [N], and tells of it."""
    if not mask.any():
      return
    known = self._known
    doubtful = mask & known.doubtful
    # If this is interrupted, the next sweep cannot count what it removed.
    known.doubtful[mask] = True
    removed = self._delete_items(known.keys[mask].tolist())
    self._swept[cause] += removed
    news = doubtful if not removed else mask
    news = news & ~known.told
    if news.any():
      self._tell(known.removals(news, cause))
    known.told[news] = True
    known.doubtful[mask] = False

  def _delete_items(self, keys: Sequence[int]) -> int:
    """Deletes items from the trajectory table. Returns how many there were."""
    before = self._num_deleted()
    self._delete(tables.TRAJECTORIES, keys)
    return self._num_deleted() - before

  def _num_deleted(self) -> int:
    """Items ever deleted from the trajectory table by key.

    It takes its counts under one lock, and nothing else removes items.
    """
    info = admin.info(self._channel, _CALL_TIMEOUT_S)[tables.TRAJECTORIES]
    limiter = info.rate_limiter_info
    left = limiter.insert_stats.completed - info.current_size
    if info.max_times_sampled == 1:
      left -= limiter.sample_stats.completed
    return left

  def _tell(self, removals: Sequence[entries_lib.Removal]) -> None:
    item = insert_stream.NewItem(
      [(tables.REMOVED, secrets.randbits(64), 0.0)],
      entries_lib.encode_removals(removals),
    )
    self._inserter.insert([item], _CALL_TIMEOUT_S)

  def _forget(self, mask: np.ndarray) -> None:
    """Nothing is left to do for those of `mask`, bool [N]."""
    if mask.any():
      # Their own items, too, which may have come after `_lay_together`. If this
      # fails, the index has more than is known, and is read again.
      keys = self._known.keys[mask].tolist()
      self._delete(tables.INDEX, self._known.discard(mask) + keys)

  def _delete(self, table: str, keys: Sequence[int]) -> None:
    for i in range(0, len(keys), _KEYS_PER_CALL):
      admin.delete_items(
        self._channel, table, keys[i : i + _KEYS_PER_CALL], _CALL_TIMEOUT_S
      )


def _check_balance(limiter: Any) -> None:
  if tables.balance_of(limiter.max_diff) != tables.PERMIT_BALANCE:
    raise ValueError(
      'the balance of the table must be kept by permits (admission): a limiter '
      'counts what is deleted by key as if it were still to be sampled'
    )
