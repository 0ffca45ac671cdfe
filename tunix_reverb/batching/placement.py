"""Where trajectories go in the rows of a batch: first-fit decreasing.

First-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms")
places the longest trajectory first, each into the first row with room. Here it
runs over classes of equal length: as many of a class as fit go into a row at
once, which gives the same rows at a cost of (distinct lengths x rows) instead
of (trajectories x rows). Letters: N trajectories, B rows, L positions.
"""

from __future__ import annotations

import numpy as np


class Rows:
  """B rows of L positions that trajectories are placed into."""

  def __init__(self, *, rows: int, length: int):
    self._length = length
    self._used = [0] * rows

  def place(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places trajectories by first-fit decreasing; of a length, older first.

    Args:
      positions: i32 [N], positions T + 1 that each trajectory takes, in order
        of age.

    Returns:
      (row, start), both i32 [N]; row is -1 where no row had room.
    """
    row = np.full(positions.size, -1, np.int32)
    start = np.zeros(positions.size, np.int32)
    # A stable sort keeps the order of age within a length.
    order = np.argsort(-positions, kind='stable')
    sorted_positions = positions[order]
    edges = np.flatnonzero(np.diff(sorted_positions)) + 1
    for members in np.split(order, edges):
      if members.size:
        self._place_class(members, int(positions[members[0]]), row, start)
    return row, start

  def _place_class(
    self, members: np.ndarray, size: int, row: np.ndarray, start: np.ndarray
  ) -> None:
    placed = 0
    for index, used in enumerate(self._used):
      count = min(members.size - placed, (self._length - used) // size)
      if count <= 0:
        continue
      chosen = members[placed : placed + count]
      row[chosen] = index
      start[chosen] = used + size * np.arange(count, dtype=np.int32)
      self._used[index] = used + size * count
      placed += count
      if placed == members.size:
        return
