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

_TRANSITION_COLUMNS = (
  'action',
  'reward',
  'discount',
  'behaviour_log_prob',
  'policy_version',
)


class TrajectoryAdder(core.VectorAdder):
  """Builds the trajectories of N environments and groups them into items.

  Steps are written into one preallocated block per column, [N, T, ...], so
  that a step of all environments is a few array writes, and a finished
  trajectory is one contiguous copy.
  """

  def __init__(
    self,
    *,
    columns: types.Trajectories,
    num_environments: int,
    trajectory_length: int,
    writer: core.ItemWriter,
    actor_id: int,
    item_bytes: int,
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
      item_bytes: size at which a group of trajectories is sent, bytes.
      item_age_s: age at which a group is sent, seconds.
      keep_waiting: asked each time the writer had no room; when it returns
        False the item is given up.
      clock: wall-clock seconds.
    """
    self._columns = columns
    self._length = trajectory_length
    self._writer = writer
    self._actor_id = actor_id
    self._item_age_s = item_age_s
    self._keep_waiting = keep_waiting
    self._clock = clock
    self._open = _OpenTrajectories(columns, num_environments, trajectory_length)
    self._max_item_transitions = max(
      1, int(item_bytes // _bytes_per_transition(columns))
    )
    self._group: list[list[np.ndarray]] = []
    self._group_transitions = 0
    self._group_since_s = 0.0
    self._next_episode = 0
    self.items_total = 0
    self.trajectories_total = 0
    self.given_up_total = 0

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
    now_s = self._clock()
    first = timestep.step_type == _FIRST
    if first.any():
      ids = environment_ids[first]
      self._open.begin(ids, _rows(core_state, first), now_s)
      self._open.episode_id[ids] = self._next_episode + np.arange(ids.size)
      self._next_episode += ids.size
    full = self._open.append(
      environment_ids,
      first,
      (
        action,
        timestep.reward,
        timestep.discount,
        behaviour_log_prob,
        policy_version,
      ),
      timestep.observation,
    )
    last = timestep.step_type == _LAST
    ended = full | last
    if ended.any():
      truncated = (last & (timestep.discount > 0))[ended]
      self._finish(environment_ids[ended], truncated)
      self._open.close(environment_ids[last])
      goes_on = ended & ~last
      if goes_on.any():
        ids = environment_ids[goes_on]
        self._open.overlap(ids, _rows(core_state, goes_on), now_s)
    elif self._group and now_s - self._group_since_s > self._item_age_s:
      self._send()

  def drop(self, environment_ids: np.ndarray) -> None:
    """Drops the unfinished trajectories of `environment_ids`, i32 [K]."""
    self._open.close(environment_ids)

  def flush(self) -> None:
    """See base class."""
    if self._group:
      self._send()

  def _finish(self, ids: np.ndarray, truncated: np.ndarray) -> None:
    """Copies finished trajectories into the group, and sends it when full."""
    sizes = self._open.size[ids]
    if sizes.sum() <= self._max_item_transitions:
      self._collect(self._open.take(ids, truncated, self._actor_id), sizes)
      return
    # Several items when the trajectories that end together exceed one.
    share = np.cumsum(sizes) // (self._max_item_transitions + 1)
    for part in np.split(
      np.arange(ids.size), np.flatnonzero(np.diff(share)) + 1
    ):
      self._collect(
        self._open.take(ids[part], truncated[part], self._actor_id), sizes[part]
      )

  def _collect(self, leaves: list[np.ndarray], sizes: np.ndarray) -> None:
    transitions = int(sizes.sum())
    if self._group_transitions + transitions > self._max_item_transitions:
      self.flush()
    now_s = self._clock()
    if not self._group:
      self._group_since_s = now_s
    self._group.append(leaves)
    self._group_transitions += transitions
    if (
      self._group_transitions >= self._max_item_transitions
      or now_s - self._group_since_s > self._item_age_s
    ):
      self._send()

  def _send(self) -> None:
    leaves = (
      self._group[0]
      if len(self._group) == 1
      else [np.concatenate(parts) for parts in zip(*self._group)]
    )
    self._group, self._group_transitions = [], 0
    item = tree.unflatten_as(self._columns, leaves)
    while not self._writer.write(item):
      if not self._keep_waiting():
        self.given_up_total += item.lengths.size
        return
    self.items_total += 1
    self.trajectories_total += item.lengths.size


_FIRST = int(dm_env.StepType.FIRST)
_LAST = int(dm_env.StepType.LAST)
_CLOSED = -1


class _OpenTrajectories:
  """The unfinished trajectory of each environment, [N, T + 1, ...] per column.

  The slot after the last transition takes what comes with FIRST: a closed
  trajectory has size -1, so its "transition" goes to slot -1, which nobody
  reads, and its observation to slot 0.
  """

  def __init__(self, columns: types.Trajectories, num: int, length: int):
    block = lambda spec: np.zeros(
      (num, length + 1, *spec.shape[1:]), spec.dtype
    )
    self.size = np.full(num, _CLOSED, np.int64)
    self.episode_id = np.zeros(num, np.int64)
    self._length = length
    self._created_at_s = np.zeros(num)
    self._observation = [block(s) for s in tree.flatten(columns.observation)]
    self._transitions = [
      block(getattr(columns, name)) for name in _TRANSITION_COLUMNS
    ]
    self._core_state = [
      np.zeros((num, *spec.shape[1:]), spec.dtype)
      for spec in tree.flatten(columns.core_state)
    ]

  def begin(
    self, ids: np.ndarray, core_state: types.Nest, now_s: float
  ) -> None:
    """Expects FIRST of `ids`; an unfinished trajectory is forgotten."""
    self.size[ids] = _CLOSED
    self._created_at_s[ids] = now_s
    for to, values in zip(self._core_state, tree.flatten(core_state)):
      to[ids] = values

  def close(self, ids: np.ndarray) -> None:
    """Forgets the trajectories of `ids`."""
    self.size[ids] = _CLOSED

  def overlap(
    self, ids: np.ndarray, core_state: types.Nest, now_s: float
  ) -> None:
    """Begins the next trajectory with the last timestep of the full one."""
    self.begin(ids, core_state, now_s)
    for block in self._observation:
      block[ids, 0] = block[ids, self._length]
    self.size[ids] = 0

  def append(
    self,
    ids: np.ndarray,
    first: np.ndarray,
    transitions: Sequence[np.ndarray],
    observation: types.Nest,
  ) -> np.ndarray:
    """Writes a timestep; returns bool [K], True where T is reached."""
    at = self.size[ids]
    closed = at < 0
    if (closed != first).any():
      raise ValueError(
        f'environment_ids ({ids[closed & ~first].tolist()}) must start with a '
        'FIRST timestep: pass what reset() returned'
      )
    for block, values in zip(self._transitions, transitions):
      block[ids, at] = values
    at += 1
    self.size[ids] = at
    leaves = (
      (observation,)
      if isinstance(observation, np.ndarray)
      else tree.flatten(observation)
    )
    for block, values in zip(self._observation, leaves):
      block[ids, at] = values
    return at == self._length

  def take(
    self, ids: np.ndarray, truncated: np.ndarray, actor_id: int
  ) -> list[np.ndarray]:
    """Copies out the trajectories of `ids`: the leaves of a `Trajectories`."""
    lengths = self.size[ids]
    if ids.size == 1:
      n, size = int(ids[0]), int(lengths[0])
      at, at_timesteps = (n, slice(size)), (n, slice(size + 1))
    else:
      at = (np.repeat(ids, lengths), _ranges(lengths))
      at_timesteps = (np.repeat(ids, lengths + 1), _ranges(lengths + 1))
    return [
      *(np.array(block[at_timesteps]) for block in self._observation),
      *(np.array(block[at]) for block in self._transitions),
      np.ones(int(lengths.sum()), np.bool_),
      *(state[ids] for state in self._core_state),
      lengths.astype(np.int32),
      self._created_at_s[ids],
      np.full(ids.size, actor_id, np.int32),
      self.episode_id[ids],
      truncated,
    ]


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


def _ranges(lengths: np.ndarray) -> np.ndarray:
  """0..length-1 of each run, end to end."""
  starts = np.cumsum(lengths) - lengths
  return np.arange(int(lengths.sum())) - np.repeat(starts, lengths)


def _rows(nest: types.Nest, mask: np.ndarray) -> types.Nest:
  return tree.map_structure(lambda x: x[mask], nest)


def _bytes_per_transition(columns: types.Trajectories) -> float:
  leaves = tree.flatten(
    [columns.observation]
    + [getattr(columns, name) for name in _TRANSITION_COLUMNS]
  )
  return sum(
    spec.dtype.itemsize * float(np.prod(spec.shape[1:])) for spec in leaves
  )
