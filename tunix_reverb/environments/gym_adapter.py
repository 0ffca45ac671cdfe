"""Gymnasium environments as `dm_env` ones.

Termination becomes LAST with discount 0, truncation LAST with discount 1; both
at once is a termination. The observation at either is the episode's final one,
never the next episode's first. Without automatic reset in between, Gymnasium's
`final_observation` questions do not arise.

Spaces: actions `Discrete` (from 0, whatever its `start`), `MultiDiscrete` and
`MultiBinary` (int32 arrays from 0), `Box`; observations these and nested
`Dict` and `Tuple`. A `Discrete` observation is an int32 scalar, from the
space's own `start`. 64-bit numbers are narrowed to 32 bits.
"""

from __future__ import annotations

from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.environments import canonical

_FIRST, _MID, _LAST = dm_env.StepType


class GymEnvironment(dm_env.Environment):
  """A Gymnasium environment behind dm_env's interface."""

  def __init__(
    self,
    environment: Any,
    *,
    seed: int | None = None,
    max_episode_steps: int | None = None,
  ):
    """Args:
      environment: a `gymnasium.Env`.
      seed: passed to the first reset.
      max_episode_steps: truncates episodes at this length, steps. Counting
        here is cheaper than a `TimeLimit` wrapper.

    Raises:
      errors.UserError: a space is not supported.
    """
    self._environment = environment
    self._seed = seed
    self._limit = max_episode_steps or -1
    self._elapsed_steps = 0
    self._needs_reset = True
    self._observation_spec = observation_spec(environment.observation_space)
    self._action_spec = action_spec(environment.action_space)
    self._gym_step = _stepper(environment)

  def reset(self) -> dm_env.TimeStep:
    observation, _ = self._environment.reset(seed=self._seed)
    self._seed = None  # A second seeding would repeat the first episode.
    self._elapsed_steps = 0
    self._needs_reset = False
    return dm_env.restart(canonical.cast(self._observation_spec, observation))

  def step(self, action: Any) -> dm_env.TimeStep:
    if self._needs_reset:
      return self.reset()
    step_type, reward, discount, observation = self.step_raw(action)
    return dm_env.TimeStep(
      step_type,
      np.float32(reward),
      np.float32(discount),
      canonical.cast(self._observation_spec, observation),
    )

  def step_raw(self, action: Any) -> tuple:
    """Steps a running episode; see `canonical`."""
    observation, reward, terminated, truncated, _ = self._gym_step(action)
    self._elapsed_steps += 1
    if terminated:
      self._needs_reset = True
      return _LAST, reward, 0.0, observation
    if truncated or self._elapsed_steps == self._limit:
      self._needs_reset = True
      return _LAST, reward, 1.0, observation
    return _MID, reward, 1.0, observation

  def observation_spec(self) -> types.Nest:
    return self._observation_spec

  def action_spec(self) -> specs.Array:
    return self._action_spec

  def reward_spec(self) -> specs.Array:
    return specs.Array((), np.float32, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='discount')

  def close(self) -> None:
    self._environment.close()


def observation_spec(space: Any, path: str = 'observation') -> types.Nest:
  """The spec of a Gymnasium observation space.

  Raises:
    errors.UserError: the space is not supported.
  """
  from gymnasium import spaces

  if isinstance(space, spaces.Dict):
    return {
      k: observation_spec(s, f'{path}/{k}') for k, s in space.spaces.items()
    }
  if isinstance(space, spaces.Tuple):
    return tuple(
      observation_spec(s, f'{path}/{i}') for i, s in enumerate(space.spaces)
    )
  if isinstance(space, spaces.Discrete):
    start = int(space.start)
    return specs.BoundedArray(
      (), np.int32, start, start + int(space.n) - 1, name=path
    )
  if isinstance(space, spaces.MultiDiscrete):
    start = np.asarray(space.start)
    return specs.BoundedArray(
      space.shape, np.int32, start, start + space.nvec - 1, name=path
    )
  if isinstance(space, spaces.MultiBinary):
    return specs.BoundedArray(space.shape, np.int8, 0, 1, name=path)
  if isinstance(space, spaces.Box):
    own = specs.BoundedArray(
      space.shape, space.dtype, space.low, space.high, name=path
    )
    return canonical.canonical_spec(own, path)
  raise _unsupported('observation', space, 'Dict, Tuple, ')


def action_spec(space: Any) -> specs.Array:
  """The spec of a Gymnasium action space; integers count from 0.

  Raises:
    errors.UserError: the space is not supported.
  """
  from gymnasium import spaces

  if isinstance(space, spaces.Discrete):
    return specs.DiscreteArray(int(space.n), dtype=np.int32, name='action')
  if isinstance(space, spaces.MultiDiscrete):
    return specs.BoundedArray(
      space.shape, np.int32, 0, space.nvec - 1, name='action'
    )
  if isinstance(space, spaces.MultiBinary):
    return specs.BoundedArray(space.shape, np.int32, 0, 1, name='action')
  if isinstance(space, spaces.Box):
    return specs.BoundedArray(
      space.shape, space.dtype, space.low, space.high, name='action'
    )
  raise _unsupported('action', space, '')


def _unsupported(kind: str, space: Any, nests: str) -> errors.UserError:
  return errors.UserError(
    f'{kind} space ({space!r}) must be made of {nests}Discrete, '
    'MultiDiscrete, MultiBinary or Box; wrap the environment to convert it'
  )


def _stepper(environment: Any) -> Any:
  """`environment.step` taking actions of our spec."""
  from gymnasium import spaces

  space, step = environment.action_space, environment.step
  if isinstance(space, spaces.Discrete):
    start = int(space.start)
    return lambda action: step(int(action) + start)
  if isinstance(space, spaces.MultiDiscrete):
    start, dtype = np.asarray(space.start), space.dtype
    return lambda action: step((np.asarray(action) + start).astype(dtype))
  dtype = space.dtype
  return lambda action: step(np.asarray(action, dtype=dtype))
