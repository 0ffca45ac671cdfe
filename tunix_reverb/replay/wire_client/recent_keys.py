"""Which items were seen lately."""

from __future__ import annotations


class RecentKeys:
  """Remembers at least the last `capacity` keys, and at most twice as many."""

  def __init__(self, capacity: int):
    """Args: capacity: keys; each takes about 100 bytes."""
    self._capacity = capacity
    self._newer: set[int] = set()
    self._older: set[int] = set()

  def add(self, key: int) -> bool:
    """Remembers `key`; whether it is new."""
    if key in self._newer or key in self._older:
      return False
    if len(self._newer) >= self._capacity:
      self._older, self._newer = self._newer, set()
    self._newer.add(key)
    return True
