"""Specs: what an environment offers, what an item's columns look like.

Letters: N trajectories, S transitions over all of them (see `types`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import dm_env
from dm_env import specs
import numpy as np
import tree

from tunix_reverb import types


class EnvironmentSpec(NamedTuple):
  """Specs of one environment, as dm_env states them."""

  observation: Any
  action: Any
  reward: specs.Array
  discount: specs.BoundedArray


def make_environment_spec(environment: dm_env.Environment) -> EnvironmentSpec:
  """Collects the four specs of `environment`."""
  return EnvironmentSpec(
    observation=environment.observation_spec(),
    action=environment.action_spec(),
    reward=environment.reward_spec(),
    discount=environment.discount_spec(),
  )


def smallest_integer_dtype(minimum: int, maximum: int) -> np.dtype:
  """The smallest integer dtype that holds `minimum`..`maximum`."""
  for name in ('uint8', 'int8', 'uint16', 'int16', 'uint32', 'int32', 'int64'):
    info = np.iinfo(name)
    if info.min <= minimum and maximum <= info.max:
      return np.dtype(name)
  raise ValueError(f'no integer dtype holds {minimum}..{maximum}')


def stored_action_spec(action_spec: specs.Array) -> specs.Array:
  """The shape and dtype in which one action is stored.

  Integers take the smallest dtype that holds them; floats are float32.
  """
  if np.issubdtype(action_spec.dtype, np.integer):
    dtype = smallest_integer_dtype(
      int(np.min(action_spec.minimum)), int(np.max(action_spec.maximum))
    )
  else:
    dtype = np.dtype(np.float32)
  return specs.Array(action_spec.shape, dtype, name='action')


def stored_observation_dtype(dtype: Any) -> np.dtype:
  """float64 is stored as float32, everything else as it is."""
  return (
    np.dtype(np.float32) if np.dtype(dtype) == np.float64 else np.dtype(dtype)
  )


def trajectories_spec(
  environment_spec: EnvironmentSpec,
  core_state_spec: types.Nest = (),
  *,
  has_turns: bool = False,
  has_advantage: bool = False,
) -> types.Trajectories:
  """Specs of every column of an item; the leading axis N or S is None.

  Args:
    environment_spec: specs of one environment.
    core_state_spec: nest of arrays or specs of one (unbatched) recurrent
      state; `()` for feed-forward networks.
    has_turns: whether each transition belongs to a turn.
    has_advantage: whether actors say the advantage of each action.

  Returns:
    `Trajectories` of `ColumnSpec`.
  """
  action = stored_action_spec(environment_spec.action)
  column = lambda dtype, shape=(): ColumnSpec((None, *shape), np.dtype(dtype))
  return types.Trajectories(
    observation=tree.map_structure(
      lambda s: column(stored_observation_dtype(s.dtype), s.shape),
      environment_spec.observation,
    ),
    action=column(action.dtype, action.shape),
    reward=column(np.float32),
    discount=column(np.float32),
    behaviour_log_prob=column(np.float32),
    policy_version=column(np.int32),
    loss_mask=column(np.bool_),
    core_state=tree.map_structure(
      lambda s: column(s.dtype, s.shape), core_state_spec
    ),
    lengths=column(np.int32),
    created_at_s=column(np.float64),
    actor_id=column(np.int32),
    episode_id=column(np.int64),
    truncated=column(np.bool_),
    permit_id=column(np.int64),
    turn_id=column(np.int32) if has_turns else (),
    advantage=column(np.float32) if has_advantage else (),
  )


def join(parts: Sequence[types.Trajectories]) -> types.Trajectories:
  """Trajectories laid end to end."""
  if len(parts) == 1:
    return parts[0]
  return tree.map_structure(lambda *columns: np.concatenate(columns), *parts)


def bytes_per_transition(columns: types.Trajectories) -> float:
  """Bytes that one transition takes in an item, headers left out."""
  per_trajectory = (
    'lengths',
    'created_at_s',
    'actor_id',
    'episode_id',
    'truncated',
    'permit_id',
    'core_state',
  )
  leaves = tree.flatten(
    [
      getattr(columns, name)
      for name in columns._fields
      if name not in per_trajectory
    ]
  )
  return float(
    sum(spec.dtype.itemsize * np.prod(spec.shape[1:]) for spec in leaves)
  )


class ColumnSpec:
  """Shape (None is any size) and dtype of one column; a leaf for `tree`."""

  __slots__ = ('dtype', 'shape')

  def __init__(self, shape: tuple[int | None, ...], dtype: np.dtype):
    self.shape = tuple(shape)
    self.dtype = np.dtype(dtype)

  def accepts(self, array: np.ndarray) -> bool:
    """Whether `array` has this dtype and a shape that fits."""
    return (
      array.dtype == self.dtype
      and array.ndim == len(self.shape)
      and all(a == b for a, b in zip(array.shape, self.shape) if b is not None)
    )

  def __eq__(self, other: object) -> bool:
    return (
      isinstance(other, ColumnSpec)
      and self.shape == other.shape
      and self.dtype == other.dtype
    )

  def __hash__(self) -> int:
    return hash((self.shape, self.dtype))

  def __repr__(self) -> str:
    dims = ', '.join('?' if d is None else str(d) for d in self.shape)
    return f'{self.dtype}[{dims}]'


def flatten_columns(columns: types.Nest) -> dict[str, Any]:
  """Leaves by path, such as 'observation/position', in a stable order."""
  return {
    '/'.join(str(p) for p in path): leaf
    for path, leaf in tree.flatten_with_path(_as_dict(columns))
  }


def differences(ours: types.Nest, theirs: types.Nest) -> list[str]:
  """One line per column in which two nests of `ColumnSpec` differ."""
  left, right = flatten_columns(ours), flatten_columns(theirs)
  lines = []
  for name in sorted(left.keys() | right.keys()):
    a, b = left.get(name, 'absent'), right.get(name, 'absent')
    if a != b:
      lines.append(f'{name}: this role has {a!r}, the server has {b!r}')
  return lines


def _as_dict(columns: types.Nest) -> types.Nest:
  if isinstance(columns, types.Trajectories):
    return columns._asdict()
  return columns
