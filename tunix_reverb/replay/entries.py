"""What is told of trajectories without their data: entries and removals.

Where permits keep the balance, whoever inserts an item inserts an `Entry` of
it as well; the sweeper removes by entries what has become too old, and tells
the learner by `Removal`s.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import math
from typing import Any
from typing import NamedTuple

import numpy as np

from tunix_reverb import specs
from tunix_reverb.replay import small_tables


class Entry(NamedTuple):
  """One item of the trajectory table: one trajectory, or those of a group.

  Attributes:
    key: the item's, and of the entry's own item in `tables.INDEX` and in
      `tables.ANNOUNCEMENTS`.
    policy_version: the item's minimum; the priority of all three.
    created_at_s: wall-clock seconds at its first action.
    permit_id: it was begun under.
    length: transitions, of a group those of the longest trajectory.
  """

  key: int
  policy_version: int
  created_at_s: float
  permit_id: int
  length: int


class Removal(NamedTuple):
  """One item that the sweeper removed from the trajectory table.

  It may be told twice, and of an item that was sampled before it could be
  removed: a reader who settles each permit once, at whatever comes first, the
  trajectory or the removal, counts right. What is told is no longer in the
  table, but a sampler may hold it still.

  Attributes:
    key: the item's.
    permit_id: it was begun under.
    length: transitions.
    cause: a code of `staleness.bound.CAUSES`.
  """

  key: int
  permit_id: int
  length: int
  cause: int


def encode_entry(entry: Entry) -> list[np.ndarray]:
  """The columns of one entry's item; see `encode_entries`."""
  return encode_entries([entry])


def encode_entries(entries: Sequence[Entry]) -> list[np.ndarray]:
  """The columns of one item of `tables.INDEX` or `tables.ANNOUNCEMENTS`: [N].

  Whoever inserts a trajectory inserts one entry per item; the sweeper lays
  many of the index together in one.
  """
  return _encode(entries, small_tables.ENTRY_COLUMNS)


def decode_entries(columns: Sequence[np.ndarray]) -> list[Entry]:
  """Reads what `encode_entries` made; ValueError if it did not."""
  entries = [Entry(*row) for row in _rows(columns, small_tables.ENTRY_COLUMNS)]
  for entry in entries:
    if not math.isfinite(entry.created_at_s):
      raise ValueError(f'created_at_s ({entry.created_at_s}) must be finite')
  return entries


def encode_removals(removals: Sequence[Removal]) -> list[np.ndarray]:
  """The columns of one item of `tables.REMOVED`; each is [N]."""
  return _encode(removals, small_tables.REMOVED_COLUMNS)


def decode_removals(columns: Sequence[np.ndarray]) -> list[Removal]:
  """Reads what `encode_removals` made; ValueError if it did not."""
  return [Removal(*row) for row in _rows(columns, small_tables.REMOVED_COLUMNS)]


def _encode(
  records: Sequence[tuple[Any, ...]],
  expected: Mapping[str, specs.ColumnSpec],
) -> list[np.ndarray]:
  if not records:
    raise ValueError('there must be at least one record')
  return [
    np.array(values, spec.dtype)
    for values, spec in zip(zip(*records), expected.values())
  ]


def _rows(
  columns: Sequence[np.ndarray], expected: Mapping[str, specs.ColumnSpec]
) -> Iterator[tuple[Any, ...]]:
  if len(columns) != len(expected):
    raise ValueError(
      f'an item of {len(columns)} columns must hold {", ".join(expected)}'
    )
  for column, (name, spec) in zip(columns, expected.items()):
    if not spec.accepts(column):
      raise ValueError(
        f'column {name} ({column.dtype}{list(column.shape)}) must be {spec}'
      )
  if len({column.size for column in columns}) != 1:
    raise ValueError('the columns of an item must be of one length')
  return zip(*(column.tolist() for column in columns))
