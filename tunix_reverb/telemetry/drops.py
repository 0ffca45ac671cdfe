"""Counts what was dropped, by cause and by length decile.

Dropping by age hits long trajectories first, which biases what is learnt
towards short ones; a user must be able to see that it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
import threading

import numpy as np

NUM_DECILES = 10


class DropCounter:
  """Totals of dropped trajectories; may be used from several threads.

  A trajectory's decile is its place in the distribution of all lengths seen so
  far: decile 0 holds the shortest tenth. Lengths that tie share the decile of
  the middle of their tie.
  """

  def __init__(self, causes: Sequence[str]):
    """Counts drops for each of `causes`."""
    self._causes = tuple(causes)
    self._lock = threading.Lock()
    self._seen = np.zeros(1, np.int64)
    self._dropped = {cause: np.zeros(1, np.int64) for cause in self._causes}
    self._unread = dict.fromkeys(self._causes, 0)

  def see(self, lengths: np.ndarray) -> None:
    """Counts trajectories of `lengths` (i32 [N], transitions) as generated."""
    with self._lock:
      self._grow(lengths)
      self._seen += np.bincount(lengths, minlength=self._seen.size)

  def drop(self, cause: str, lengths: np.ndarray) -> None:
    """Counts trajectories of `lengths` as dropped because of `cause`."""
    with self._lock:
      self._grow(lengths)
      self._dropped[cause] += np.bincount(lengths, minlength=self._seen.size)

  def set_unread(self, cause: str, total: int) -> None:
    """Sets how many were dropped in all without their lengths being known.

    They count in `by_cause`, and in no decile.
    """
    with self._lock:
      self._unread[cause] = total

  @property
  def seen_total(self) -> int:
    """Trajectories seen."""
    return int(self._seen.sum())

  def by_cause(self) -> dict[str, int]:
    """Trajectories dropped, by cause."""
    return {
      cause: int(n.sum()) + self._unread[cause]
      for cause, n in self._dropped.items()
    }

  def by_decile(self) -> np.ndarray:
    """Trajectories dropped, i64 [10], shortest tenth first."""
    with self._lock:
      seen = self._seen.copy()
      dropped = np.sum(list(self._dropped.values()), axis=0)
    total = max(1, seen.sum())
    middle = np.cumsum(seen) - seen / 2
    deciles = np.minimum(
      (middle * NUM_DECILES / total).astype(int), NUM_DECILES - 1
    )
    return np.bincount(deciles, weights=dropped, minlength=NUM_DECILES).astype(
      np.int64
    )

  def _grow(self, lengths: np.ndarray) -> None:
    need = int(lengths.max(initial=0)) + 1 - self._seen.size
    if need > 0:
      self._seen = np.pad(self._seen, (0, need))
      self._dropped = {
        cause: np.pad(n, (0, need)) for cause, n in self._dropped.items()
      }
