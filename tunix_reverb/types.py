"""Named records that flow from `env.step` to the gradient.

Letters in shapes: N trajectories, S transitions over all of them, T
transitions of one trajectory (T + 1 timesteps), B rows of a batch, L positions
of a row, K environments answering at once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any
from typing import NamedTuple

import numpy as np

# A (possibly nested) structure of arrays.
Nest = Any


class PolicyOutput(NamedTuple):
  """What a behaviour policy returns for K environments.

  Attributes:
    action: nest of [K, ...], as the policy's head samples it.
    log_prob: f32 [K], log-probability of `action` under the behaviour policy.
    core_state: nest of [K, ...], recurrent state after this call; `()` for
      feed-forward networks.
  """

  action: Nest
  log_prob: Any
  core_state: Nest


class Trajectories(NamedTuple):
  """N trajectories of one actor process, laid end to end: one replay item.

  Trajectory n has `lengths[n]` = T_n transitions and T_n + 1 timesteps; the
  last timestep is there for the bootstrap value only. S = sum(lengths).

  In a trajectory of tokens an observation is one token and the action is the
  next one, whoever wrote it: the policy where `loss_mask` is True, the prompt
  or a tool where it is False.

  Attributes:
    observation: nest of [S + N, ...], all timesteps.
    action: [S, ...], chosen at timesteps 0..T-1 of each trajectory.
    reward: f32 [S], received on arrival at timesteps 1..T.
    discount: f32 [S], the environment's own: 0 on termination.
    behaviour_log_prob: f32 [S].
    policy_version: i32 [S], version of the variables that chose the action.
    loss_mask: bool [S], True where the transition counts in the loss.
    core_state: nest of [N, ...], recurrent state before each trajectory's
      first action; `()` for feed-forward networks.
    lengths: i32 [N], transitions of each trajectory.
    created_at_s: f64 [N], wall-clock seconds at the trajectory's first action.
    actor_id: i32 [N].
    episode_id: i64 [N], unique per episode and actor process.
    truncated: bool [N], True where the last timestep ended its episode with a
      discount above 0.
    permit_id: i64 [N], the permit each trajectory was started under; 0 without
      admission.
    turn_id: i32 [S], which turn of its trajectory the action belongs to; `()`
      for agents without turns.
    advantage: f32 [S], of the action, as a group of trajectories of the same
      task gives it; `()` where the learner estimates it.
  """

  observation: Nest
  action: Any
  reward: Any
  discount: Any
  behaviour_log_prob: Any
  policy_version: Any
  loss_mask: Any
  core_state: Nest
  lengths: Any
  created_at_s: Any
  actor_id: Any
  episode_id: Any
  truncated: Any
  permit_id: Any
  turn_id: Any = ()
  advantage: Any = ()


class SampledItem(NamedTuple):
  """One item as it comes out of a table.

  Attributes:
    key: Reverb's uint64 key of the item.
    priority: the item's priority, its minimum `policy_version`.
    times_sampled: how often the item has been sampled, this time included.
    trajectories: the item's columns.
    inserted_at_s: when it was inserted, by the server's clock, in seconds
      since the epoch; NaN from the official client, which does not tell.
  """

  key: int
  priority: float
  times_sampled: int
  trajectories: Trajectories
  inserted_at_s: float = math.nan


class Batch(NamedTuple):
  """A packed batch: B rows of L positions, each row holding whole segments.

  A segment is one trajectory. Its T + 1 timesteps take consecutive positions;
  position t carries the timestep's observation and the transition t -> t + 1.
  The last position of a segment carries no transition.

  Attributes:
    observation: nest of [B, L, ...].
    action: [B, L, ...].
    reward: f32 [B, L].
    discount: f32 [B, L], the environment's own.
    behaviour_log_prob: f32 [B, L].
    policy_version: i32 [B, L].
    loss_mask: bool [B, L], True where a transition counts in the loss.
    segment_ids: i32 [B, L], 1..S ascending within a row, 0 is padding.
    segment_positions: i32 [B, L], 0..T within each segment.
    core_state: nest of [B, M, ...], recurrent state before each segment's
      first position, by segment id - 1 (M is the most segments a row holds);
      `()` for feed-forward networks.
    turn_id: i32 [B, L], `()` for agents without turns.
    is_rejected: bool [B, L], True on transitions that are too old to learn
      from. They stay in the loss's denominator, so that the others do not weigh
      more. `()` if there are none.
    advantage: f32 [B, L], `()` where the learner estimates it.
    is_current: bool [B, L], True on transitions whose trajectory was acted out
      by the very params that learn from it. `()` if nobody says.
    proximal_log_prob: f32 [B, L], of the action before the first update on the
      batch. Only the update itself adds it, else it is `()`.
  """

  observation: Nest
  action: Any
  reward: Any
  discount: Any
  behaviour_log_prob: Any
  policy_version: Any
  loss_mask: Any
  segment_ids: Any
  segment_positions: Any
  core_state: Nest
  turn_id: Any = ()
  is_rejected: Any = ()
  advantage: Any = ()
  is_current: Any = ()
  proximal_log_prob: Any = ()


@dataclasses.dataclass(frozen=True)
class Segments:
  """Host-side facts of the trajectories in a batch, by segment; N of them.

  Attributes:
    row: i32 [N], start: i32 [N], the segment's first position in its row.
    length: i32 [N], transitions T (the segment takes T + 1 positions).
    policy_version: i32 [N], the trajectory's minimum version.
    created_at_s: f64 [N].
    permit_id: i64 [N], 0 without admission.
  """

  row: np.ndarray
  start: np.ndarray
  length: np.ndarray
  policy_version: np.ndarray
  created_at_s: np.ndarray
  permit_id: np.ndarray


@dataclasses.dataclass(frozen=True)
class PackedBatch:
  """A batch on the host, with what the last staleness check needs.

  Attributes:
    batch: arrays are NumPy's until the feed places them on the mesh.
    segments: the trajectories in it.
    bucket: the row length L.
  """

  batch: Batch
  segments: Segments
  bucket: int


@dataclasses.dataclass(frozen=True)
class Variables:
  """Params as they cross a process boundary.

  Attributes:
    policy_version: +1 per publish by the learner; the first publish is 1.
    params: pytree of NumPy arrays.
  """

  policy_version: int
  params: Nest


class Permit(NamedTuple):
  """The right to begin one trajectory.

  Attributes:
    permit_id: unique over all incarnations of the learner, > 0.
    policy_version: the least version of the variables that may act.
  """

  permit_id: int
  policy_version: int


class Removal(NamedTuple):
  """One trajectory that left its table before the learner could sample it.

  Attributes:
    permit_id: it was begun under.
    length: transitions.
    cause: a code of `staleness.bound.CAUSES`; FRESH if there is no trajectory
      and the permit was given back unused.
  """

  permit_id: int
  length: int
  cause: int


class PermitTableState(NamedTuple):
  """The counters of the table of permits at one moment.

  Attributes:
    inserts: permits inserted since the table was reset.
    samples: permits taken since then.
    size: permits in the table.
  """

  inserts: int
  samples: int
  size: int
