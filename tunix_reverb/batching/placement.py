"""Where trajectories go in a batch: first-fit decreasing, then even shards.

First-fit decreasing (Johnson 1973, "Near-optimal bin packing algorithms")
places the longest trajectory first, each into the first row with room. Here it
runs over classes of equal length: as many of a class as fit go into a row at
once, which gives the same rows at a cost of (distinct lengths x rows) instead
of (trajectories x rows). The first rows get the longest trajectories, which
makes them the costliest: `even_rows` deals them out to the devices. Letters: N
trajectories, B rows, L positions.
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


def attention_cost(
  positions: np.ndarray, row: np.ndarray, rows: int
) -> np.ndarray:
  """What attention within segments costs in each row, up to a factor, f64 [B].

  Args:
    positions: i32 [N], positions of each trajectory.
    row: i32 [N], its row; -1 for none.
    rows: B.
  """
  placed = row >= 0
  squares = positions[placed].astype(np.float64) ** 2
  return np.bincount(row[placed], weights=squares, minlength=rows)


def even_rows(cost: np.ndarray, num_shards: int) -> np.ndarray:
  """Deals rows to shards so that their costs are even: each row's new place.

  The devices of a step wait for the slowest. Greedy, the costliest row first,
  each to the shard of least cost that has room (Graham 1969, "Bounds on
  multiprocessing timing anomalies", with a limit on the number). Within a shard
  the costliest comes first, so that micro-batches, which are consecutive rows
  of every shard, are even as well.

  Args:
    cost: f64 [B], of each row.
    num_shards: divides B; each holds B / num_shards consecutive rows.

  Returns:
    i32 [B], a permutation.
  """
  if num_shards == 1 or num_shards == cost.size:
    return np.arange(cost.size, dtype=np.int32)
  per_shard = cost.size // num_shards
  total, count = np.zeros(num_shards), np.zeros(num_shards, np.int32)
  place = np.empty(cost.size, np.int32)
  for index in np.argsort(-cost, kind='stable').tolist():
    shard = int(np.argmin(np.where(count < per_shard, total, np.inf)))
    place[index] = shard * per_shard + count[shard]
    total[shard] += cost[index]
    count[shard] += 1
  return place
