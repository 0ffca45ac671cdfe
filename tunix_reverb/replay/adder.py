"""Adders: timesteps in, items of whole trajectories out.

A trajectory begins at a FIRST timestep or where the previous trajectory of its
episode was cut, and ends at LAST or after `trajectory_length` transitions. A
cut overlaps by one timestep: the last one of a trajectory, there for the
bootstrap value, is the first one of the next. Nothing else is stored twice and
nothing crosses an episode's end:

  episode of 5 transitions, trajectory_length 3      stored trajectories
  o0 -a0-> o1 -a1-> o2 -a2-> o3 -a3-> o4 -a4-> o5    [o0 o1 o2 o3] [o3 o4 o5]

Letters: N environments, K of them stepping together, T transitions, S
transitions of an item.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import time
from typing import Any

import dm_env
import numpy as np
import tree

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.replay import item_sender

_TRANSITION_COLUMNS = (
  'action',
  'reward',
  'discount',
  'behaviour_log_prob',
  'policy_version',
)


class TrajectoryAdder(item_sender.ItemSender, core.VectorAdder):
  """Builds the trajectories of N environments and groups them into items.

  A step of K environments is one write per column into a ring of timesteps.
  The end of a trajectory only notes where it lies in the ring; what has ended
  is copied out together, once there is enough of it for an item.
  """

  def __init__(
    self,
    *,
    columns: types.Trajectories,
    num_environments: int,
    trajectory_length: int,
    writer: core.ItemWriter,
    actor_id: int,
    item_transitions: int,
    item_age_s: float,
    keep_waiting: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.time,
  ):
    """Writes items through `writer`.

    Args:
      columns: `specs.ColumnSpec` of every column.
      num_environments: N.
      trajectory_length: most transitions T of one trajectory.
      writer: takes the items.
      actor_id: stored with every trajectory.
      item_transitions: number of transitions at which they are sent; a
        longer trajectory is an item of its own.
      item_age_s: age at which they are sent whatever their size, seconds.
      keep_waiting: asked each time the writer had no room; when it returns
        False the item is given up.
      clock: wall-clock seconds.
    """
    super().__init__(writer, keep_waiting)
    self._full = np.int64(trajectory_length)
    self._item_age_s = item_age_s
    self._clock = clock
    self._max_item_transitions = item_transitions
    # Room for the open trajectories and for an item's worth of ended ones.
    slack = trajectory_length + self._max_item_transitions // num_environments
    self._ring = _Ring(
      columns, num_environments, trajectory_length + 2 + slack, actor_id
    )
    self._slack = slack
    self._steps_since_sent = 0
    self._ended = _Ended()
    self._next_episode = 0

  def add(
    self,
    environment_ids: np.ndarray,
    *,
    action: types.Nest,
    behaviour_log_prob: np.ndarray,
    policy_version: np.ndarray,
    timestep: dm_env.TimeStep,
    core_state: types.Nest = (),
  ) -> None:
    """See base class."""
    choice = (behaviour_log_prob, policy_version)
    transitions = (action, timestep.reward, timestep.discount, *choice)
    now_s = self._clock()
    if self._steps_since_sent > self._slack:
      self.flush()
    self._steps_since_sent += 1
    size = self._ring.append(environment_ids, transitions, timestep.observation)
    # Most steps neither start nor end a trajectory; a size of 0 would be one
    # that has just been started.
    full, count = size == self._full, environment_ids.size
    if _count(timestep.step_type == _MID) < count or _count(size) < count:
      self._turn(environment_ids, timestep, size, full, core_state, now_s)
    elif _count(full):
      self._cut(environment_ids, full, core_state, now_s)
    if self._ended.is_due(self._max_item_transitions, self._item_age_s, now_s):
      self.flush()

  def _cut(
    self,
    environment_ids: np.ndarray,
    full: np.ndarray,
    core_state: types.Nest,
    now_s: float,
  ) -> None:
    """Ends the full trajectories, and starts the next at the same timestep."""
    ids = environment_ids[full]
    self._ended.add(self._ring, ids, np.zeros(ids.size, np.bool_), now_s)
    state = [leaf[full] for leaf in tree.flatten(core_state)]
    self._ring.start(ids, state, now_s)

  def _turn(
    self,
    environment_ids: np.ndarray,
    timestep: dm_env.TimeStep,
    size: np.ndarray,
    full: np.ndarray,
    core_state: types.Nest,
    now_s: float,
  ) -> None:
    """Starts and ends trajectories after a step in which some do."""
    first = timestep.step_type == _FIRST
    last = timestep.step_type == _LAST
    if _count((size == 0) & ~first):
      lost = environment_ids[(size == 0) & ~first]
      self._ring.close(lost)
      raise ValueError(
        f'environment_ids ({lost.tolist()}) must start with a FIRST timestep: '
        'pass what reset() returned'
      )
    ended = (full | last) & ~first
    if _count(ended):
      truncated = (last & (timestep.discount > 0))[ended]
      self._ended.add(self._ring, environment_ids[ended], truncated, now_s)
      self._ring.close(environment_ids[last])
    # A trajectory starts at FIRST, or where the one before it was cut.
    starts = first | (ended & ~last)
    if _count(starts):
      ids = environment_ids[starts]
      state = [leaf[starts] for leaf in tree.flatten(core_state)]
      self._ring.start(ids, state, now_s)
    if _count(first):
      ids = environment_ids[first]
      self._ring.episode_id[ids] = self._next_episode + np.arange(ids.size)
      self._next_episode += ids.size

  def drop(self, environment_ids: np.ndarray) -> None:
    """Drops the unfinished trajectories of `environment_ids`, i32 [K]."""
    self._ring.close(environment_ids)

  def lacks_permit(self, environment_ids: np.ndarray) -> np.ndarray:
    """Where a trajectory waits for a permit before its first action, bool [K].

    An environment keeps its permit until a trajectory has ended: one that was
    dropped leaves it to the next.

    Args:
      environment_ids: i32 [K].
    """
    return self._ring.lacks_permit(environment_ids)

  def admit(self, environment_ids: np.ndarray, permit_id: np.ndarray) -> None:
    """Gives permits; the age of these trajectories counts from here.

    Args:
      environment_ids: i32 [K], all of which lack one.
      permit_id: i64 [K].
    """
    self._ring.admit(environment_ids, permit_id, self._clock())

  def held_permits(self) -> list[int]:
    """Permits given whose trajectories have not ended."""
    return self._ring.held_permits()

  def flush(self) -> None:
    """See base class."""
    self._steps_since_sent = 0
    ended, self._ended = self._ended, _Ended()
    for part in ended.split(self._max_item_transitions):
      self._send(self._ring.take(part))


_FIRST = np.int32(dm_env.StepType.FIRST)
_MID = np.int32(dm_env.StepType.MID)
_LAST = np.int32(dm_env.StepType.LAST)
_CLOSED = -1
# Much faster than `.any()` on few elements.
_count = np.count_nonzero


class _Ended:
  """Ended trajectories that still lie in the ring, in the order they ended.

  Each part is (environment ids, slot of the first timestep, transitions,
  created_at_s, episode ids, truncated, permit ids, *core states), all
  [n, ...].
  """

  def __init__(self) -> None:
    self._parts: list[tuple[np.ndarray, ...]] = []
    self._transitions = 0
    self._since_s = 0.0

  def add(
    self, ring: _Ring, ids: np.ndarray, truncated: np.ndarray, now_s: float
  ) -> None:
    if not self._parts:
      self._since_s = now_s
    part = ring.describe(ids, truncated)
    self._parts.append(part)
    self._transitions += int(part[2].sum())

  def is_due(self, max_transitions: int, max_age_s: float, now_s: float):
    """Whether there is enough for an item, or something is old."""
    return bool(self._parts) and (
      self._transitions >= max_transitions or now_s - self._since_s > max_age_s
    )

  def split(self, max_transitions: int) -> list[list[np.ndarray]]:
    """All of them, in parts of at most `max_transitions` or one trajectory."""
    if not self._parts:
      return []
    whole = [np.concatenate(columns) for columns in zip(*self._parts)]
    if self._transitions <= max_transitions:
      return [whole]
    edges, total = [], 0
    for i, length in enumerate(whole[2].tolist()):
      if total and total + length > max_transitions:
        edges.append(i)
        total = 0
      total += length
    return list(zip(*(np.split(column, edges) for column in whole)))


class _Ring:
  """The latest timesteps of each environment, [R, N, ...] per column.

  A slot holds a timestep's observation and the transition that left it. The
  last timestep of a trajectory has none, so a cut trajectory shares its last
  slot with the first of the next, and what comes with FIRST is written over
  the slot that follows LAST without anybody reading it.
  """

  def __init__(
    self, columns: types.Trajectories, num: int, slots: int, actor_id: int
  ):
    block = lambda spec: np.zeros((slots, num, *spec.shape[1:]), spec.dtype)
    self.episode_id = np.zeros(num, np.int64)
    self._columns = columns
    self._slots = slots
    self._actor_id = actor_id
    self._size = np.full(num, _CLOSED, np.int64)
    self._slot = np.zeros(num, np.int64)
    self._row: int | None = 0  # The slot of all, while they are at one slot.
    self._created_at_s = np.zeros(num)
    self._permit_id = np.zeros(num, np.int64)
    self._observation = [block(s) for s in tree.flatten(columns.observation)]
    self._transitions = [
      block(getattr(columns, name)) for name in _TRANSITION_COLUMNS
    ]
    self._core_state = [
      np.zeros((num, *spec.shape[1:]), spec.dtype)
      for spec in tree.flatten(columns.core_state)
    ]

  def close(self, ids: np.ndarray) -> None:
    """Forgets the open trajectories of `ids`."""
    self._size[ids] = _CLOSED

  def start(
    self, ids: np.ndarray, core_state: Sequence[np.ndarray], now_s: float
  ) -> None:
    """Starts trajectories of `ids` at their latest timestep."""
    self._size[ids] = 0
    self._created_at_s[ids] = now_s
    for to, values in zip(self._core_state, core_state):
      to[ids] = values

  def lacks_permit(self, ids: np.ndarray) -> np.ndarray:
    """Where a trajectory has started without one, bool [K]."""
    return (self._size[ids] == 0) & (self._permit_id[ids] == 0)

  def admit(self, ids: np.ndarray, permit_id: np.ndarray, now_s: float) -> None:
    """Gives permits to the trajectories that have just started."""
    self._permit_id[ids] = permit_id
    self._created_at_s[ids] = now_s

  def held_permits(self) -> list[int]:
    """Permits of trajectories that are open, or of the next ones."""
    return self._permit_id[self._permit_id != 0].tolist()

  def append(
    self,
    ids: np.ndarray,
    transitions: Sequence[np.ndarray],
    observation: types.Nest,
  ) -> np.ndarray:
    """Writes a timestep; returns the transitions so far, i64 [K].

    A closed trajectory has -1 transitions before its FIRST and 0 after it.
    """
    at, at_next = self._advance(ids)
    for block, values in zip(self._transitions, transitions):
      block[at] = values
    leaves = (
      (observation,)
      if isinstance(observation, np.ndarray)
      else tree.flatten(observation)
    )
    for block, values in zip(self._observation, leaves):
      block[at_next] = values
    size = self._size[ids]
    size += 1
    self._size[ids] = size
    return size

  def _advance(self, ids: np.ndarray) -> tuple[Any, Any]:
    """Index of the slots of `ids` before and after they move on by one.

    While all environments have always answered together they are all at the
    same slot, and a column is written as one row.
    """
    if self._row is not None:
      if ids.size == self._slot.size:
        row, self._row = self._row, (self._row + 1) % self._slots
        return row, self._row
      self._slot[:] = self._row
      self._row = None
    slot = self._slot[ids]
    next_slot = (slot + 1) % self._slots
    self._slot[ids] = next_slot
    return (slot, ids), (next_slot, ids)

  def describe(
    self, ids: np.ndarray, truncated: np.ndarray
  ) -> tuple[np.ndarray, ...]:
    """Where the open trajectories of `ids` lie; see `_Ended`.

    They take their permits with them.
    """
    size = self._size[ids]
    slot = self._slot[ids] if self._row is None else self._row
    permit_id = self._permit_id[ids]
    self._permit_id[ids] = 0
    return (
      ids,
      (slot - size) % self._slots,
      size,
      self._created_at_s[ids],
      self.episode_id[ids],
      truncated,
      permit_id,
      *(state[ids] for state in self._core_state),
    )

  def take(self, part: Sequence[np.ndarray]) -> types.Trajectories:
    """Copies trajectories out."""
    ids, start, lengths, *per_trajectory = part
    created_at_s, episode_id, truncated, permit_id, *core = per_trajectory
    at = self._positions(ids, start, lengths)
    at_timesteps = self._positions(ids, start, lengths + 1)
    columns = self._columns
    return types.Trajectories(
      observation=tree.unflatten_as(
        columns.observation, [b[at_timesteps] for b in self._observation]
      ),
      core_state=tree.unflatten_as(columns.core_state, core),
      lengths=lengths.astype(np.int32),
      created_at_s=created_at_s,
      actor_id=np.full(ids.size, self._actor_id, np.int32),
      episode_id=episode_id,
      truncated=truncated,
      permit_id=permit_id,
      loss_mask=np.ones(int(lengths.sum()), np.bool_),
      **{n: b[at] for n, b in zip(_TRANSITION_COLUMNS, self._transitions)},
    )

  def _positions(
    self, ids: np.ndarray, start: np.ndarray, count: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Index of `count` slots from `start` of each of `ids`, end to end."""
    begin = np.cumsum(count) - count
    slot = np.arange(int(count.sum())) + np.repeat(start - begin, count)
    return slot % self._slots, np.repeat(ids, count)


class EnvironmentAdder(core.Adder):
  """Acme-style adder of one environment, over a `TrajectoryAdder` of one."""

  def __init__(self, adder: TrajectoryAdder, *, core_state: types.Nest = ()):
    """Adds through `adder`.

    Args:
      adder: built with `num_environments=1`.
      core_state: nest of [...], the initial recurrent state.
    """
    self._adder = adder
    self._initial_core_state = tree.map_structure(
      lambda s: np.asarray(s)[None], core_state
    )
    self._ids = np.zeros(1, np.int32)

  def add_first(self, timestep: dm_env.TimeStep) -> None:
    """See base class."""
    if not timestep.first():
      raise ValueError(
        f'step_type ({timestep.step_type!r}) of add_first must be FIRST; '
        'pass what env.reset() returned'
      )
    nothing = np.zeros((), np.int32)  # Ignored with FIRST.
    self._adder.add(
      self._ids,
      action=nothing,
      behaviour_log_prob=nothing,
      policy_version=nothing,
      timestep=_batched(
        dm_env.TimeStep(_FIRST, 0.0, 1.0, timestep.observation)
      ),
      core_state=self._initial_core_state,
    )

  def add(
    self, action: types.Nest, next_timestep: dm_env.TimeStep, extras: Any = ()
  ) -> None:
    """See base class."""
    missing = {'log_prob', 'policy_version'} - set(extras)
    if missing:
      raise ValueError(
        f'extras ({sorted(extras)}) must hold log_prob and policy_version; '
        f'missing: {", ".join(sorted(missing))}'
      )
    self._adder.add(
      self._ids,
      action=_batched(action),
      behaviour_log_prob=_batched(extras['log_prob']),
      policy_version=_batched(extras['policy_version']),
      timestep=_batched(
        next_timestep._replace(step_type=int(next_timestep.step_type))
      ),
      core_state=_batched(extras.get('core_state', ())),
    )

  def reset(self) -> None:
    """See base class."""
    self._adder.drop(self._ids)

  def flush(self) -> None:
    """Sends the finished trajectories."""
    self._adder.flush()


def _batched(nest: types.Nest) -> types.Nest:
  return tree.map_structure(lambda x: np.asarray(x)[None], nest)
