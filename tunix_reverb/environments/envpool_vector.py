"""envpool: N environments stepped by C++ threads (Weng et al. 2022).

What envpool 1.2.5 does otherwise than dm_env, and is put right here:
  * It reports discount 0 when an episode reaches `max_episode_steps`. That is
    a truncation: discount 1. An episode that also terminates in that very step
    cannot be told apart and counts as truncated.
  * The reward of FIRST is uninitialised memory in some environments.
  * Its observation is a record that also holds ids and infos; only what the
    game observes is kept.
  * Images are [C, H, W]; they are turned to [H, W, C], which costs nothing.
  * Its `observation_spec()` fails where an info has no bounds, and writes
    "unbounded" as the smallest and largest positive float64.
Its automatic reset already is the contract's: after LAST the next action is
ignored and FIRST comes back.

Only `recv` goes below envpool's public API: the public one drops the
truncation flag.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import difflib
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.environments import canonical

_MAX_SEED = 2**31 - 1
_FIRST = int(dm_env.StepType.FIRST)


def _make_pool(
  name: str, *, num_environments: int, seed: int, num_threads: int
) -> Any:
  """Raises errors.UserError: no such id, or one with several players."""
  import envpool

  known = envpool.list_all_envs()
  if name not in known:
    close = difflib.get_close_matches(name, known, n=3) or known[:5]
    raise errors.UserError(
      f'envpool id ({name!r}) must be one of the {len(known)} in envpool, '
      f'such as {", ".join(close)}'
    )
  pool = envpool.make(
    name,
    env_type='dm',
    num_envs=num_environments,
    num_threads=num_threads,
    seed=seed % _MAX_SEED,
  )
  if pool.config['max_num_players'] != 1:
    raise errors.UserError(
      f'envpool id ({name!r}) must be for one player; it is for '
      f'{pool.config["max_num_players"]}'
    )
  return pool


def _own_spec(array_spec: Any, name: str) -> specs.Array:
  """envpool's `ArraySpec` of one observation leaf, canonical."""
  shape = tuple(d for d in array_spec.shape if d != -1)
  minimum, maximum = (
    np.asarray(array_spec.minimum),
    np.asarray(array_spec.maximum),
  )
  dtype = np.dtype(array_spec.dtype)
  if dtype.kind == 'f' and np.all(minimum == np.finfo(dtype).tiny):
    return canonical.canonical_spec(specs.Array(shape, dtype, name))
  spec = specs.BoundedArray(shape, dtype, minimum, maximum, name)
  spec = canonical.canonical_spec(spec)
  if not _channels_first(spec):
    return spec
  return specs.BoundedArray(
    shape[1:] + shape[:1], spec.dtype, np.min(minimum), np.max(maximum), name
  )


def _channels_first(spec: specs.Array) -> bool:
  return (
    spec.dtype == np.uint8
    and len(spec.shape) == 3
    and spec.shape[0] < spec.shape[2]
  )


class _State:
  """Reads envpool's list of state arrays as timesteps of [N, ...]."""

  def __init__(self, pool: Any):
    keys = list(pool._state_keys)  # pylint: disable=protected-access
    self._at = {key: i for i, key in enumerate(keys)}
    array_specs = pool.spec.state_array_spec
    # Nest of (index, whether to move the channels last), by observation path.
    self._leaves: types.Nest = None
    self.observation_spec: types.Nest = None
    if 'obs' in self._at:
      self._leaves, self.observation_spec = self._leaf('obs', array_specs)
    else:
      self._leaves, self.observation_spec = {}, {}
      for key in keys:
        if key.startswith('obs:'):
          name = key.removeprefix('obs:')
          self._leaves[name], self.observation_spec[name] = self._leaf(
            key, array_specs
          )

  def _leaf(self, key: str, array_specs: Mapping[str, Any]) -> tuple:
    name = key.removeprefix('obs:')
    spec = _own_spec(array_specs[key], name)
    native = tuple(d for d in array_specs[key].shape if d != -1)
    return (self._at[key], native != spec.shape, spec.dtype), spec

  def read(self, state: list[np.ndarray]) -> tuple[np.ndarray, dm_env.TimeStep]:
    """(environment_ids, batched timestep); may change `state` in place."""
    at = self._at
    discount = state[at['discount']]
    truncated = state[at['trunc']]
    if np.count_nonzero(truncated):
      discount = np.where(truncated, np.float32(1.0), discount)
    reward = state[at['reward']]
    first = state[at['step_type']] == _FIRST
    if np.count_nonzero(first):
      reward = np.where(first, np.float32(0.0), reward)
    leaves = self._leaves
    if isinstance(leaves, dict):
      observation = {k: _read_leaf(state, leaf) for k, leaf in leaves.items()}
    else:
      observation = _read_leaf(state, leaves)
    return state[at['info:env_id']], dm_env.TimeStep(
      state[at['step_type']], reward, discount, observation
    )


def _read_leaf(state: list[np.ndarray], leaf: tuple) -> np.ndarray:
  index, move_channels, dtype = leaf
  array = state[index]
  if move_channels:
    array = array.transpose(0, 2, 3, 1)
  return array.astype(dtype, copy=False)


class EnvpoolVectorEnvironment(core.VectorEnvironment):
  """N environments of envpool, all of them stepped together.

  `recv` returns all N, so `send` takes all N. envpool's own wait cannot be
  given a deadline; its environments are C++ games that do not hang.
  """

  def __init__(
    self,
    name: str,
    *,
    num_environments: int,
    seed: int,
    num_threads: int = 1,
  ):
    """Args:
      name: an id of `envpool.list_all_envs()`.
      num_environments: N.
      seed: of all of them; each gets its own.
      num_threads: C++ threads that step them.

    Raises:
      ImportError: envpool is not installed.
      errors.UserError: no such id.
    """
    self._pool = _make_pool(
      name,
      num_environments=num_environments,
      seed=seed,
      num_threads=num_threads,
    )
    self._num_environments = num_environments
    self._state = _State(self._pool)
    self._action_map = canonical.ActionMap(self._pool.action_spec())
    self._pool.async_reset()
    self._pending = True
    self._closed = False

  @property
  def num_environments(self) -> int:
    return self._num_environments

  @property
  def failures(self) -> Mapping[str, int]:
    """Always zero: envpool's environments do not fail one by one."""
    return {'error': 0, 'timeout': 0}

  def recv(self, timeout_s: float) -> tuple[np.ndarray, dm_env.TimeStep] | None:
    if not self._pending or self._closed:
      return None
    self._pending = False
    return self._state.read(self._pool._recv())  # pylint: disable=protected-access

  def send(self, action: types.Nest, environment_ids: np.ndarray) -> None:
    if self._closed:
      raise RuntimeError('send() was called after close()')
    if self._pending or len(environment_ids) != self._num_environments:
      raise ValueError(
        f'environment_ids ({environment_ids}) must be those of all '
        f'{self._num_environments} environments, once after each recv(): '
        'envpool steps them together'
      )
    if not self._action_map.is_identity:
      action = self._action_map(action)
    self._pool.send(np.asarray(action), environment_ids)
    self._pending = True

  def close(self) -> None:
    if not self._closed:
      self._closed = True
      self._pool.close()


class EnvpoolEnvironment(dm_env.Environment):
  """One environment of envpool as a canonical `dm_env` one."""

  def __init__(self, name: str, *, seed: int):
    """Args: name, seed: as for `EnvpoolVectorEnvironment`."""
    self._pool = _make_pool(name, num_environments=1, seed=seed, num_threads=1)
    self._state = _State(self._pool)
    self._action_map = canonical.ActionMap(self._pool.action_spec())
    self._ids = np.zeros(1, np.int32)
    self._needs_reset = True

  def reset(self) -> dm_env.TimeStep:
    self._pool.async_reset()
    self._needs_reset = False
    return dm_env.restart(self._receive().observation)

  def step(self, action: Any) -> dm_env.TimeStep:
    if self._needs_reset:
      return self.reset()
    own = np.asarray(self._action_map(action))[None]
    self._pool.send(own, self._ids)
    timestep = self._receive()
    self._needs_reset = timestep.last()
    return timestep

  step_raw = step

  def _receive(self) -> dm_env.TimeStep:
    _, batched = self._state.read(self._pool._recv())  # pylint: disable=protected-access
    first: Callable[[np.ndarray], Any] = lambda array: array[0]
    observation = batched.observation
    if isinstance(observation, dict):
      observation = {k: np.asarray(first(v)) for k, v in observation.items()}
    else:
      observation = np.asarray(first(observation))
    return dm_env.TimeStep(
      dm_env.StepType(int(batched.step_type[0])),
      batched.reward[0],
      batched.discount[0],
      observation,
    )

  def observation_spec(self) -> types.Nest:
    return self._state.observation_spec

  def action_spec(self) -> specs.Array:
    return self._action_map.spec

  def reward_spec(self) -> specs.Array:
    return specs.Array((), np.float32, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='discount')

  def close(self) -> None:
    self._pool.close()
