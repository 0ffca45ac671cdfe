"""The tables of small items that a replay server serves beside trajectories."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import numpy as np

from tunix_reverb import specs
from tunix_reverb.replay import tables


def _column(dtype: str, *shape: int | None) -> specs.ColumnSpec:
  return specs.ColumnSpec(shape, np.dtype(dtype))


# What is told of N trajectories without their data, in this order; see
# `entries.Entry`.
ENTRY_COLUMNS: Mapping[str, specs.ColumnSpec] = {
  'key': _column('uint64', None),
  'policy_version': _column('int64', None),
  'created_at_s': _column('float64', None),
  'permit_id': _column('int64', None),
  'length': _column('int32', None),
}

# What is told of N items that were removed; see `entries.Removal`.
REMOVED_COLUMNS: Mapping[str, specs.ColumnSpec] = {
  'key': _column('uint64', None),
  'permit_id': _column('int64', None),
  'length': _column('int32', None),
  'cause': _column('int8', None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallTable:
  """A table of small items beside the trajectories; it never blocks inserts.

  Attributes:
    name: the table's name.
    sampler: 'fifo', or 'min_heap' on the priority.
    max_items: beyond which the oldest item goes.
    max_times_sampled: after which an item goes; 0 keeps it.
    columns: what an item holds, in this order.
  """

  name: str
  columns: Mapping[str, specs.ColumnSpec]
  sampler: str = 'fifo'
  max_items: int = tables.UNBOUNDED_ITEMS
  max_times_sampled: int = 1


def make_small_tables(balance: str) -> tuple[SmallTable, ...]:
  """The tables beside the trajectories and the variables.

  `policy_version` is always there: its one item's priority is the version that
  the learner published last. With balance 'permits' there are also

  index: the entry of every item in the trajectory table, under the same key
    and with the item's priority, until the sweeper deletes it.
  announcements: the same entries, for the sweeper to take.
  removed: what the sweeper removed, for the learner to take.
  permits: what actors take before they begin a trajectory.

  Args:
    balance: of the `tables.TableConfig`.
  """
  version = SmallTable(
    name=tables.POLICY_VERSION,
    columns={'policy_version': _column('int64')},
    max_items=1,
    max_times_sampled=0,
  )
  if balance == tables.LIMITER:
    return (version,)
  return (
    version,
    SmallTable(
      name=tables.INDEX,
      columns=ENTRY_COLUMNS,
      sampler='min_heap',
      max_times_sampled=0,
    ),
    SmallTable(name=tables.ANNOUNCEMENTS, columns=ENTRY_COLUMNS),
    SmallTable(name=tables.REMOVED, columns=REMOVED_COLUMNS),
    SmallTable(
      name=tables.PERMITS,
      columns={
        'permit_id': _column('int64'),
        'policy_version': _column('int64'),
      },
    ),
  )
