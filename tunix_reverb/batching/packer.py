"""Packs pending trajectories into batches of fixed shape.

A packer is a value on the host: no threads, no clocks, no I/O. Letters: N
trajectories, B rows, L positions, M segments of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np
import tree

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.batching import buckets as buckets_lib
from tunix_reverb.batching import placement

# What must be pending, in batches, for first-fit to fill a batch with it.
_FULL = 1.05

# Columns with one entry per transition, copied to a segment's positions 0..T-1.
_TRANSITION_COLUMNS = (
  'action',
  'reward',
  'discount',
  'behaviour_log_prob',
  'policy_version',
  'loss_mask',
  'turn_id',
  'advantage',
)


@dataclasses.dataclass
class _Pending:
  """An item's trajectories that no batch has taken yet.

  Attributes:
    trajectories: the item.
    index: i64 [n], which of its trajectories are left.
    carried: whether a batch was made while these were pending.
  """

  trajectories: types.Trajectories
  index: np.ndarray
  carried: bool = False

  def positions(self) -> np.ndarray:
    return self.trajectories.lengths[self.index] + 1

  def permit_id(self) -> int:
    """Of the first of them; in a group its first member has that of all."""
    permit_id = self.trajectories.permit_id
    return int(permit_id[self.index[0]] or permit_id.max())

  def follows(self, other: _Pending) -> bool:
    """Whether it is of the group, under the same permit, as `other`."""
    is_first = bool(self.trajectories.permit_id[self.index[0]])
    return self.trajectories is other.trajectories and not is_first


def minimum_versions(trajectories: types.Trajectories) -> np.ndarray:
  """The oldest `policy_version` of each trajectory, i32 [N]."""
  return np.minimum.reduceat(
    trajectories.policy_version, _starts(trajectories.lengths)
  )


class Packer:
  """Gathers trajectories and packs a batch when a window of them is full.

  The bucket of a batch is the one that the oldest pending trajectory needs, or
  the next larger one if too little is pending that fits it. Trajectories that
  an earlier batch left behind go in first, so none waits for more than one
  further batch of its bucket; then the rest by first-fit decreasing, shorter
  ones filling the gaps of longer ones. Whole rows then change places so that
  attention costs the devices about the same.

  With `max_trajectories`, batches are made by number: of so many trajectories
  with the smallest permit ids, so that a batch does not depend on the order in
  which its trajectories came. They go into the smallest bucket that takes all
  of them. A group, whose first trajectory has the permit of all, goes into one
  batch: that may then be of a few less.
  """

  def __init__(
    self,
    *,
    buckets: Sequence[buckets_lib.Bucket],
    columns: types.Trajectories,
    window: float,
    max_trajectories: int = 0,
    num_shards: int = 1,
  ):
    """Packs into `buckets`.

    Args:
      buckets: ascending by length.
      columns: `specs.ColumnSpec` of every column, as of
        `specs.trajectories_spec`.
      window: trajectories gathered before a batch is packed, in batches.
      max_trajectories: of one batch; a batch is packed when there are as many.
        0 sets no limit.
      num_shards: shards that the rows of a batch are split into.
    """
    self._buckets = tuple(buckets)
    self._columns = columns
    self._window = window
    self._max_trajectories = max_trajectories
    self._num_shards = num_shards
    self._pending: list[_Pending] = []
    self._pending_positions = 0

  @property
  def pending_positions(self) -> int:
    """Positions that the pending trajectories will take."""
    return self._pending_positions

  @property
  def pending_lengths(self) -> np.ndarray:
    """Transitions of each pending trajectory, i32 [N]."""
    if not self._pending:
      return np.zeros(0, np.int32)
    return np.concatenate([p.positions() - 1 for p in self._pending])

  @property
  def is_ready(self) -> bool:
    """Whether enough is pending for a batch."""
    wanted = self._window * self._buckets[-1].positions
    if self._pending_positions >= wanted:
      return True
    most = self._max_trajectories
    return 0 < most <= sum(p.index.size for p in self._pending)

  def next_bucket(self) -> int:
    """Index of the bucket of the next batch; -1 if nothing is pending.

    When the packer is ready, larger buckets can be filled as well.
    """
    if not self._pending:
      return -1
    oldest = int(self._pending[0].positions()[0])
    positions = self.pending_lengths + 1
    last = len(self._buckets) - 1
    for index, bucket in enumerate(self._buckets[:last]):
      if bucket.length < oldest:
        continue
      fitting = int(positions[positions <= bucket.length].sum())
      if fitting >= _FULL * bucket.positions:
        return index
    return last

  def oldest_created_at_s(self) -> float | None:
    """When the oldest pending trajectory was created; None if there is none."""
    if not self._pending:
      return None
    return min(
      float(p.trajectories.created_at_s[p.index].min()) for p in self._pending
    )

  def add(
    self, trajectories: types.Trajectories, keep: np.ndarray | None = None
  ) -> None:
    """Takes an item's trajectories.

    Args:
      trajectories: one item.
      keep: bool [N], which of them to take; all if None.

    Raises:
      ValueError: a trajectory is longer than the largest bucket.
    """
    lengths = trajectories.lengths
    index = np.arange(lengths.size) if keep is None else np.flatnonzero(keep)
    if not index.size:
      return
    longest = int(lengths[index].max()) + 1
    if longest > self._buckets[-1].length:
      raise ValueError(
        f'trajectory positions ({longest}) must be <= the largest bucket '
        f'({self._buckets[-1].length}); raise bucket_lengths or lower '
        'trajectory_length'
      )
    pending = _Pending(trajectories, index)
    self._pending.append(pending)
    self._pending_positions += int(pending.positions().sum())

  def pop(self, *, flush: bool = False) -> types.PackedBatch | None:
    """The next batch, or None while the window is not full.

    Args:
      flush: makes a batch of whatever is pending, even if it is little.
    """
    if not self._pending or not (flush or self.is_ready):
      return None
    if self._max_trajectories:
      return self._pack_by_number()
    return self._pack(self._buckets[self.next_bucket()])

  def pop_bucket(self, index: int) -> types.PackedBatch:
    """A batch of a given bucket, of whatever fits it; it may hold nothing.

    Args:
      index: of the bucket.
    """
    return self._pack(self._buckets[index])

  def _pack_by_number(self) -> types.PackedBatch:
    """Packs the oldest permits' trajectories into the smallest bucket."""
    self._pending = [
      _Pending(p.trajectories, p.index[i : i + 1])
      for p in self._pending
      for i in range(p.index.size)
    ]
    self._pending.sort(key=_Pending.permit_id)
    positions = (self.pending_lengths + 1)[: self._count_by_number()]
    for bucket in self._buckets:
      rows = placement.Rows(rows=bucket.rows, length=bucket.length)
      row, start = rows.place(positions)
      if row.min() >= 0:
        break
    else:
      # Too many for any batch: no longer one may displace an older one.
      rows = placement.Rows(rows=bucket.rows, length=bucket.length)
      placed = [rows.place(one) for one in np.split(positions, positions.size)]
      row, start = (np.concatenate(part) for part in zip(*placed))
    left = (0, len(self._pending) - positions.size)
    return self._take(
      bucket, np.pad(row, left, constant_values=-1), np.pad(start, left)
    )

  def _count_by_number(self) -> int:
    """How many of the pending go into the next batch: whole groups."""
    for count in range(self._max_trajectories, 0, -1):
      pair = self._pending[count - 1 : count + 1]
      if len(pair) < 2 or not pair[1].follows(pair[0]):
        return count
    return self._max_trajectories  # A group larger than a batch.

  def _pack(self, bucket: buckets_lib.Bucket) -> types.PackedBatch:
    positions = self.pending_lengths + 1
    carried = np.array(
      [p.carried for p in self._pending for _ in range(p.index.size)], np.bool_
    )
    row = np.full(positions.size, -1, np.int32)
    start = np.zeros(positions.size, np.int32)
    rows = placement.Rows(rows=bucket.rows, length=bucket.length)
    for turn in (carried, ~carried):
      members = np.flatnonzero(turn & (positions <= bucket.length))
      row[members], start[members] = rows.place(positions[members])
    return self._take(bucket, row, start)

  def _take(
    self, bucket: buckets_lib.Bucket, row: np.ndarray, start: np.ndarray
  ) -> types.PackedBatch:
    """Moves the placed trajectories (row >= 0) from pending into a batch."""
    positions = self.pending_lengths + 1
    cost = placement.attention_cost(positions, row, bucket.rows)
    place = placement.even_rows(cost, self._num_shards)
    row = np.where(row >= 0, place[row], np.int32(-1))
    builder = _BatchBuilder(bucket, self._columns, row, start)
    left: list[_Pending] = []
    begin = 0
    for pending in self._pending:
      end = begin + pending.index.size
      placed = row[begin:end] >= 0
      if placed.any():
        chosen = np.flatnonzero(placed) + begin
        builder.copy(pending.trajectories, pending.index[placed], chosen)
      if not placed.all():
        left.append(
          _Pending(pending.trajectories, pending.index[~placed], True)
        )
      begin = end
    self._pending = left
    self._pending_positions = sum(int(p.positions().sum()) for p in left)
    return builder.build()


class _BatchBuilder:
  """Copies placed trajectories into fresh arrays, a column at a time.

  The arrays are new for every batch: a device may alias them, so a reused
  buffer would change a batch that is still in use.
  """

  def __init__(
    self,
    bucket: buckets_lib.Bucket,
    columns: types.Trajectories,
    row: np.ndarray,
    start: np.ndarray,
  ):
    self._bucket = bucket
    self._row, self._start = row, start
    self._segment_id = _segment_ids(row, start)
    flat = bucket.positions
    empty = lambda spec: np.zeros((flat, *spec.shape[1:]), spec.dtype)
    self._observation = tree.map_structure(empty, columns.observation)
    self._transitions = {
      name: empty(getattr(columns, name))
      for name in _TRANSITION_COLUMNS
      if isinstance(getattr(columns, name), specs.ColumnSpec)
    }
    self._segment_ids = np.zeros(flat, np.int32)
    self._positions = np.zeros(flat, np.int32)
    self._core_state = tree.map_structure(
      lambda spec: np.zeros(
        (bucket.rows, bucket.max_segments, *spec.shape[1:]), spec.dtype
      ),
      columns.core_state,
    )
    self._segments = [_no_segments()]

  def copy(
    self,
    source: types.Trajectories,
    index: np.ndarray,
    chosen: np.ndarray,
  ) -> None:
    """Copies trajectories `index` of `source`, placed as entries `chosen`."""
    whole = index.size == source.lengths.size
    lengths = source.lengths[index]
    row, start = self._row[chosen], self._start[chosen]
    base = row.astype(np.int64) * self._bucket.length + start

    offsets = _within(lengths + 1)
    target = np.repeat(base, lengths + 1) + offsets
    first = _starts(source.lengths + 1)[index]
    picked = slice(None) if whole else np.repeat(first, lengths + 1) + offsets
    tree.map_structure(
      lambda to, values: to.__setitem__(target, values[picked]),
      self._observation,
      source.observation,
    )
    self._segment_ids[target] = np.repeat(self._segment_id[chosen], lengths + 1)
    self._positions[target] = offsets

    offsets = _within(lengths)
    target = np.repeat(base, lengths) + offsets
    first = _starts(source.lengths)[index]
    picked = slice(None) if whole else np.repeat(first, lengths) + offsets
    for name, to in self._transitions.items():
      to[target] = getattr(source, name)[picked]

    tree.map_structure(
      lambda to, values: to.__setitem__(
        (row, self._segment_id[chosen] - 1), values[index]
      ),
      self._core_state,
      source.core_state,
    )
    self._segments.append(
      types.Segments(
        row=row,
        start=start,
        length=lengths,
        policy_version=minimum_versions(source)[index],
        created_at_s=source.created_at_s[index],
        permit_id=source.permit_id[index],
      )
    )

  def batch(self) -> types.Batch:
    """The arrays, [B, L, ...]."""
    shape = (self._bucket.rows, self._bucket.length)
    reshape = lambda array: array.reshape(shape + array.shape[1:])
    return types.Batch(
      observation=tree.map_structure(reshape, self._observation),
      segment_ids=reshape(self._segment_ids),
      segment_positions=reshape(self._positions),
      core_state=self._core_state,
      is_rejected=np.zeros(shape, np.bool_),
      is_current=np.zeros(shape, np.bool_),
      **{name: reshape(a) for name, a in self._transitions.items()},
    )

  def build(self) -> types.PackedBatch:
    """The batch and the facts of its segments."""
    segments = types.Segments(
      **{
        field.name: np.concatenate(
          [getattr(s, field.name) for s in self._segments]
        )
        for field in dataclasses.fields(types.Segments)
      }
    )
    return types.PackedBatch(
      batch=self.batch(), segments=segments, bucket=self._bucket.length
    )


def _no_segments() -> types.Segments:
  """Those of a batch that holds nothing."""
  none = np.zeros(0, np.int32)
  return types.Segments(
    row=none,
    start=none,
    length=none,
    policy_version=none,
    created_at_s=np.zeros(0, np.float64),
    permit_id=np.zeros(0, np.int64),
  )


def _starts(lengths: np.ndarray) -> np.ndarray:
  """Where each run begins when runs of `lengths` lie end to end, i64 [N]."""
  return np.cumsum(lengths, dtype=np.int64) - lengths


def _within(lengths: np.ndarray) -> np.ndarray:
  """0..length-1 of each run, end to end, i32 [sum(lengths)]."""
  starts = np.repeat(_starts(lengths), lengths)
  return np.arange(starts.size, dtype=np.int32) - starts.astype(np.int32)


def _segment_ids(row: np.ndarray, start: np.ndarray) -> np.ndarray:
  """1..S by position within each row, i32 [N]; unplaced entries get 0."""
  order = np.lexsort((start, row))
  sorted_rows = row[order]
  first_of_row = np.searchsorted(sorted_rows, sorted_rows, side='left')
  ids = np.zeros(row.size, np.int32)
  ids[order] = np.arange(row.size, dtype=np.int32) - first_of_row + 1
  return np.where(row >= 0, ids, 0).astype(np.int32)


def fill(batch: types.PackedBatch) -> float:
  """The fraction of a batch's positions that hold a timestep."""
  used = int(batch.segments.length.sum()) + batch.segments.length.size
  return used / batch.batch.segment_ids.size


def empty_batch(
  bucket: buckets_lib.Bucket, columns: types.Trajectories
) -> types.Batch:
  """A batch of padding only: the shapes and dtypes to compile for."""
  none = np.zeros(0, np.int32)
  return _BatchBuilder(bucket, columns, none, none).batch()
