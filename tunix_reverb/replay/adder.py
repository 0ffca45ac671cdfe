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
    self._group: list[types.Trajectories] = []
    self._group_transitions = 0
    self._group_since_s = 0.0
    self._next_episode = 0
    self.items_total = 0
    self.trajectories_total = 0
    self.given_up_total = 0

  def add_first(
      self,
      environment_ids: np.ndarray,
      observation: types.Nest,
      core_state: types.Nest = (),
  ) -> None:
    """See base class."""
    count = environment_ids.size
    episodes = self._next_episode + np.arange(count)
    self._next_episode += count
    self._open.start(environment_ids, observation, core_state, self._clock())
    self._open.episode_id[environment_ids] = episodes

  def add(
      self,
      environment_ids: np.ndarray,
      *,
      action: types.Nest,
      behaviour_log_prob: np.ndarray,
      policy_version: np.ndarray,
      next_timestep: dm_env.TimeStep,
      core_state: types.Nest = (),
  ) -> None:
    """See base class."""
    full = self._open.append(
        environment_ids,
        action=action,
        reward=next_timestep.reward,
        discount=next_timestep.discount,
        behaviour_log_prob=behaviour_log_prob,
        policy_version=policy_version,
        observation=next_timestep.observation,
    )
    last = next_timestep.step_type == int(dm_env.StepType.LAST)
    ended = full | last
    if ended.any():
      self._finish(environment_ids, ended, last, next_timestep, core_state)
    elif self._group and self._clock() - self._group_since_s > self._item_age_s:
      self._send()

  def drop(self, environment_ids: np.ndarray) -> None:
    """Drops the unfinished trajectories of `environment_ids`, i32 [K]."""
    self._open.size[environment_ids] = _CLOSED

  def flush(self) -> None:
    """See base class."""
    if self._group:
      self._send()

  def _finish(
      self,
      environment_ids: np.ndarray,
      ended: np.ndarray,
      last: np.ndarray,
      next_timestep: dm_env.TimeStep,
      core_state: types.Nest,
  ) -> None:
    ids = environment_ids[ended]
    truncated = (last & (next_timestep.discount > 0))[ended]
    sizes = self._open.size[ids]
    # Several items when the trajectories that end together exceed one.
    share = np.cumsum(sizes) // (self._max_item_transitions + 1)
    for part in np.split(np.arange(ids.size), _edges(share)):
      self._collect(
          self._open.take(ids[part], truncated[part], self._actor_id)
      )
    self._open.size[ids] = _CLOSED
    goes_on = ended & ~last
    if goes_on.any():
      pick = lambda values: values[goes_on]
      self._open.start(
          environment_ids[goes_on],
          tree.map_structure(pick, next_timestep.observation),
          tree.map_structure(pick, core_state),
          self._clock(),
      )

  def _collect(self, trajectories: types.Trajectories) -> None:
    transitions = int(trajectories.lengths.sum())
    if self._group_transitions + transitions > self._max_item_transitions:
      self.flush()
    if not self._group:
      self._group_since_s = self._clock()
    self._group.append(trajectories)
    self._group_transitions += transitions
    if (
        self._group_transitions >= self._max_item_transitions
        or self._clock() - self._group_since_s > self._item_age_s
    ):
      self._send()

  def _send(self) -> None:
    item = (
        self._group[0]
        if len(self._group) == 1
        else tree.map_structure(lambda *a: np.concatenate(a), *self._group)
    )
    self._group, self._group_transitions = [], 0
    while not self._writer.write(item):
      if not self._keep_waiting():
        self.given_up_total += item.lengths.size
        return
    self.items_total += 1
    self.trajectories_total += item.lengths.size


_CLOSED = -1


class _OpenTrajectories:
  """The unfinished trajectory of each environment, [N, T, ...] per column."""

  def __init__(self, columns: types.Trajectories, num: int, length: int):
    block = lambda n: lambda spec: np.zeros(
        (num, n, *spec.shape[1:]), spec.dtype
    )
    self.size = np.full(num, _CLOSED, np.int64)
    self.episode_id = np.zeros(num, np.int64)
    self._length = length
    self._created_at_s = np.zeros(num)
    self._structure = columns.observation
    self._observation = [
        block(length + 1)(s) for s in tree.flatten(columns.observation)
    ]
    self._columns = {
        name: block(length)(getattr(columns, name))
        for name in _TRANSITION_COLUMNS
    }
    self._core_state = tree.map_structure(
        lambda spec: np.zeros((num, *spec.shape[1:]), spec.dtype),
        columns.core_state,
    )

  def start(
      self, ids: np.ndarray, observation: types.Nest, core_state: types.Nest,
      now_s: float,
  ) -> None:
    for to, values in zip(self._observation, tree.flatten(observation)):
      to[ids, 0] = values
    tree.map_structure(
        lambda to, values: to.__setitem__(ids, values),
        self._core_state,
        core_state,
    )
    self.size[ids] = 0
    self._created_at_s[ids] = now_s

  def append(
      self, ids: np.ndarray, *, observation: types.Nest, **columns: Any
  ) -> np.ndarray:
    """Writes a transition; returns bool [K], True where T is reached."""
    at = self.size[ids]
    if at.min() < 0:
      raise ValueError(
          f'environment_ids ({ids[at < 0].tolist()}) must have an open episode:'
          ' call add_first before add'
      )
    for name, values in columns.items():
      self._columns[name][ids, at] = values
    at += 1
    for to, values in zip(self._observation, tree.flatten(observation)):
      to[ids, at] = values
    self.size[ids] = at
    return at == self._length

  def take(
      self, ids: np.ndarray, truncated: np.ndarray, actor_id: int
  ) -> types.Trajectories:
    """Copies out the trajectories of `ids`, laid end to end."""
    lengths = self.size[ids]
    if ids.size == 1:
      n, size = int(ids[0]), int(lengths[0])
      at, at_timesteps = (n, slice(size)), (n, slice(size + 1))
    else:
      at = (np.repeat(ids, lengths), _ranges(lengths))
      at_timesteps = (np.repeat(ids, lengths + 1), _ranges(lengths + 1))
    copy = lambda block, where: np.array(block[where])
    return types.Trajectories(
        observation=tree.unflatten_as(
            self._structure,
            [copy(block, at_timesteps) for block in self._observation],
        ),
        core_state=tree.map_structure(lambda c: c[ids], self._core_state),
        loss_mask=np.ones(int(lengths.sum()), np.bool_),
        lengths=lengths.astype(np.int32),
        created_at_s=self._created_at_s[ids],
        actor_id=np.full(ids.size, actor_id, np.int32),
        episode_id=self.episode_id[ids],
        truncated=truncated,
        **{name: copy(block, at) for name, block in self._columns.items()},
    )


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
    self._adder.add_first(
        self._ids, _batched(timestep.observation), self._initial_core_state
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
        next_timestep=tree.map_structure(
            lambda x: np.asarray(x)[None],
            next_timestep._replace(step_type=int(next_timestep.step_type)),
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


def _edges(labels: np.ndarray) -> np.ndarray:
  return np.flatnonzero(np.diff(labels)) + 1


def _bytes_per_transition(columns: types.Trajectories) -> float:
  leaves = tree.flatten(
      [columns.observation]
      + [getattr(columns, name) for name in _TRANSITION_COLUMNS]
  )
  return sum(
      spec.dtype.itemsize * float(np.prod(spec.shape[1:])) for spec in leaves
  )
