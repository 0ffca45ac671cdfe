"""What a replay server serves, in plain records that know no Reverb.

The server builds its tables from a `TableDescription`, reads one back from
what is really served, and keeps one beside each checkpoint, so that "does this
run agree with that server?" is one comparison of two records.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import sys
from typing import Any

import numpy as np

from tunix_reverb import specs
from tunix_reverb import types

# Names of the tables on every server.
TRAJECTORIES = 'trajectories'
VARIABLES = 'variables'
POLICY_VERSION = 'policy_version'

# Names of those that permits need besides; see `small_tables`.
INDEX = 'index'
ANNOUNCEMENTS = 'announcements'
REMOVED = 'removed'
PERMITS = 'permits'

# What keeps inserts and samples in balance.
LIMITER = 'limiter'
PERMIT_BALANCE = 'permits'

# `max_items` of a table that something other than its size keeps small: the
# largest that Reverb takes.
UNBOUNDED_ITEMS = (1 << 31) - 1
# Limits on the balance that are never reached; Reverb's own "none".
_NO_DIFF = sys.float_info.max

# The flag that carries each fact, for messages a user can act on.
_BALANCE_FLAG = 'admission'
_FLAGS = {
  'mode': 'replay_mode',
  'sampler': 'sampler',
  'priority_exponent': 'priority_exponent',
  'max_items': 'max_table_items',
  'min_items': 'min_table_items',
  'samples_per_insert': 'samples_per_insert',
}
_TOLERANCE_FLAG = 'samples_per_insert_tolerance'
# Facts that have no meaning where permits keep the balance.
_LIMITER_FACTS = ('max_items', 'min_items', 'samples_per_insert')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
  """The trajectory table of one server.

  Attributes:
    mode: 'queue' (each item once, oldest first; inserts wait when it is full)
      or 'replay' (items are sampled `samples_per_insert` times on average, and
      a full table evicts the item of the oldest policy).
    balance: what keeps inserts and samples in balance: 'limiter', the table's
      own, or 'permits', without which no trajectory is begun. Then the table
      takes whatever comes and evicts nothing; items may be deleted by key, and
      the tables that this needs are served too. `max_items` and
      `samples_per_insert` have no meaning there.
    sampler: 'uniform' or 'prioritised', in replay mode. Prioritised samples in
      proportion to priority ** `priority_exponent`; the priority is the item's
      minimum `policy_version`, so that an item of version 0, from before the
      first publish, is not chosen while there are others.
    priority_exponent: of the prioritised sampler.
    max_items: most items in the table.
    min_items: items in the table before replay mode hands out samples.
    samples_per_insert: target ratio in replay mode.
    samples_per_insert_tolerance: slack of the ratio before one side waits, as
      a fraction of `max_items * samples_per_insert`.
  """

  mode: str = 'queue'
  balance: str = LIMITER
  sampler: str = 'uniform'
  priority_exponent: float = 1.0
  max_items: int = 16
  min_items: int = 1
  samples_per_insert: float = 2.0
  samples_per_insert_tolerance: float = 0.5

  def __post_init__(self) -> None:
    _require_choice('mode', self.mode, ('queue', 'replay'))
    _require_choice('balance', self.balance, (LIMITER, PERMIT_BALANCE))
    _require_choice('sampler', self.sampler, ('uniform', 'prioritised'))
    for name in (
      'max_items',
      'min_items',
      'samples_per_insert',
      'samples_per_insert_tolerance',
    ):
      value = getattr(self, name)
      if not value > 0:
        raise ValueError(f'{name} ({value}) must be > 0')
    if self.priority_exponent < 0:
      raise ValueError(
        f'priority_exponent ({self.priority_exponent}) must be >= 0'
      )
    if self.balance == LIMITER and self.min_items > self.max_items:
      raise ValueError(
        f'min_items ({self.min_items}) must be <= max_items '
        f'({self.max_items}), or no sample is ever handed out'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableDescription:
  """What a server serves as one table; facts only, in the words of the flags.

  Fields that do not apply hold their neutral value (queue mode: sampler
  'fifo', ratio 1, `min_items` 1; no prioritised sampler: exponent 0; balance by
  permits: ratio 1, `max_items` unbounded, no limits), so that two descriptions
  are equal exactly if the tables behave alike.

  Attributes:
    name: the table's name.
    mode: 'queue' or 'replay'.
    sampler: 'fifo', 'uniform', 'prioritised' or, of foreign tables, other.
    priority_exponent: of the prioritised sampler, else 0.
    max_items: most items in the table.
    min_items: items before samples are handed out.
    samples_per_insert: the rate limiter's ratio.
    min_diff: lowest `inserts * samples_per_insert - samples` allowed.
    max_diff: highest one.
    signature: `ColumnSpec` by path, such as 'observation/position'.
  """

  name: str
  mode: str
  sampler: str
  priority_exponent: float
  max_items: int
  min_items: int
  samples_per_insert: float
  min_diff: float
  max_diff: float
  signature: Mapping[str, specs.ColumnSpec]

  @property
  def balance(self) -> str:
    """'limiter' or 'permits' (see `TableConfig`), as the limits tell."""
    return balance_of(self.max_diff)

  def to_json(self) -> dict[str, Any]:
    """The record as JSON-able values; the inverse of `from_json`."""
    values = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
    }
    values['signature'] = {
      path: {'shape': list(spec.shape), 'dtype': spec.dtype.name}
      for path, spec in self.signature.items()
    }
    return values

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> TableDescription:
    """Reads what `to_json` wrote; KeyError or TypeError if it did not."""
    signature = {
      path: specs.ColumnSpec(tuple(spec['shape']), np.dtype(spec['dtype']))
      for path, spec in values['signature'].items()
    }
    return cls(**{**values, 'signature': signature})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimiterState:
  """A table's rate limiter at one moment, for telemetry; plain counts.

  Attributes:
    current_size: items in the table.
    max_size: most items it can hold.
    inserts_completed: items inserted since the table was first made, a
      restored checkpoint's included.
    samples_completed: samples handed out, likewise.
    can_insert: whether the limiter would let another insert through now.
    can_sample: whether it would let another sample through now.
    inserts_blocked_s: seconds that nothing could go on because inserts waited
      for samples, since the server started.
    samples_blocked_s: seconds that samples waited for inserts, likewise.
  """

  current_size: int
  max_size: int
  inserts_completed: int
  samples_completed: int
  can_insert: bool
  can_sample: bool
  inserts_blocked_s: float
  samples_blocked_s: float


def describe(
  config: TableConfig, columns: types.Trajectories
) -> TableDescription:
  """The trajectory table that `config` and `columns` ask for.

  Args:
    config: the table's configuration.
    columns: `Trajectories` of `ColumnSpec`.
  """
  queue = config.mode == 'queue'
  if queue:
    sampler, exponent = 'fifo', 0.0
  else:
    sampler = config.sampler
    exponent = config.priority_exponent if sampler == 'prioritised' else 0.0
  max_items, min_items, ratio, min_diff, max_diff = _limits(config)
  return TableDescription(
    name=TRAJECTORIES,
    mode=config.mode,
    sampler=sampler,
    priority_exponent=exponent,
    max_items=max_items,
    min_items=min_items,
    samples_per_insert=ratio,
    min_diff=min_diff,
    max_diff=max_diff,
    signature=specs.flatten_columns(columns),
  )


def _limits(config: TableConfig) -> tuple[int, int, float, float, float]:
  """Largest and smallest size, ratio, lowest and highest difference."""
  # A queue that kept its last `min_items - 1` could not be emptied.
  min_items = 1 if config.mode == 'queue' else config.min_items
  if config.balance == PERMIT_BALANCE:
    return UNBOUNDED_ITEMS, min_items, 1.0, -_NO_DIFF, _NO_DIFF
  if config.mode == 'queue':
    return config.max_items, min_items, 1.0, 0.0, float(config.max_items)
  ratio = float(config.samples_per_insert)
  # Reverb refuses a buffer below max(1, ratio): it could block both sides.
  error_buffer = max(
    config.samples_per_insert_tolerance * config.max_items * ratio,
    1.0,
    ratio,
  )
  offset = ratio * min_items
  return (
    config.max_items,
    min_items,
    ratio,
    offset - error_buffer,
    offset + error_buffer,
  )


def balance_of(max_diff: float) -> str:
  """What keeps the balance of a table with this limit on its difference."""
  return PERMIT_BALANCE if max_diff >= _NO_DIFF else LIMITER


def differences(
  ours: TableDescription, theirs: TableDescription, their_name: str
) -> list[str]:
  """One line per fact or column in which the two tables differ.

  Args:
    ours: what this run asks for.
    theirs: what is served, or was served when a checkpoint was written.
    their_name: who `theirs` is, such as 'the server'.
  """
  lines = []
  facts = dict(_FLAGS)
  if ours.balance != theirs.balance:
    mine, other = (d.balance == PERMIT_BALANCE for d in (ours, theirs))
    lines.append(
      f'{_BALANCE_FLAG}: this run has {mine}, {their_name} has {other}'
    )
    for fact in _LIMITER_FACTS:
      del facts[fact]
  for field, flag in facts.items():
    a, b = getattr(ours, field), getattr(theirs, field)
    if a != b:
      lines.append(f'{flag}: this run has {a}, {their_name} has {b}')
  limits = (ours.min_diff, ours.max_diff), (theirs.min_diff, theirs.max_diff)
  # The limits follow from the facts above; they are news only by themselves.
  if not lines and not np.allclose(*limits):
    lines.append(
      f'{_TOLERANCE_FLAG}: this run lets inserts * samples_per_insert - '
      f'samples go from {limits[0][0]:g} to {limits[0][1]:g}, {their_name} '
      f'from {limits[1][0]:g} to {limits[1][1]:g}'
    )
  for path in sorted(ours.signature.keys() | theirs.signature.keys()):
    mine = ours.signature.get(path, 'no such column')
    other = theirs.signature.get(path, 'no such column')
    if mine != other:
      lines.append(
        f'column {path}: this run has {mine}, {their_name} has {other}'
      )
  return lines


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
  if value not in choices:
    raise ValueError(f'{name} ({value!r}) must be one of {", ".join(choices)}')
