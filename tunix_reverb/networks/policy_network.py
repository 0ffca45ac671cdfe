"""The policy network: torso, recurrent core, policy and value heads.

One set of params, two ways to apply it: `step` answers K environments while
acting, `unroll` goes over packed rows while learning. Letters: K environments,
N streams, B rows of L positions, M segments per row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
from flax import linen as nn
import jax
import jax.numpy as jnp

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.networks import cores
from tunix_reverb.networks import heads
from tunix_reverb.networks import torsos
from tunix_reverb.ops import distributions

Params = Any


class _PolicyValueModule(nn.Module):
  """Params of all parts under the names torso, core, policy, value."""

  torso: nn.Module
  core: nn.Module
  policy: nn.Module
  value: nn.Module

  def step(
    self, observation: types.Nest, core_state: types.Nest
  ) -> tuple[distributions.DistributionParams, jax.Array, types.Nest]:
    outputs, core_state = self.core.step(self.torso(observation), core_state)
    return self.policy(outputs), self.value(outputs), core_state

  def unroll(
    self,
    observation: types.Nest,
    initial_state: types.Nest,
    is_start: jax.Array,
  ) -> tuple[distributions.DistributionParams, jax.Array]:
    rows, positions = is_start.shape
    features = self.torso(
      jax.tree_util.tree_map(
        lambda x: x.reshape(rows * positions, *x.shape[2:]), observation
      )
    )
    outputs = self.core.unroll(
      features.reshape(rows, positions, -1), initial_state, is_start
    )
    return self.policy(outputs), self.value(outputs)


@dataclasses.dataclass(frozen=True)
class PolicyNetwork:
  """Pure functions of params; build it with `make_policy_network`.

  Attributes:
    module: the flax module behind the functions.
    distribution: sample, mode, log_prob and entropy of the distribution params
      that `step` and `unroll` return.
    environment_spec: what the network was built for.
  """

  module: nn.Module
  distribution: distributions.Distribution
  environment_spec: specs.EnvironmentSpec

  def init(self, key: jax.Array) -> Params:
    """Fresh params."""
    observation = jax.tree_util.tree_map(
      lambda s: jnp.zeros(
        (1, *s.shape), specs.stored_observation_dtype(s.dtype)
      ),
      self.environment_spec.observation,
    )
    return self.module.init(
      key, observation, self.initial_state(1), method='step'
    )['params']

  def core_state_spec(self) -> types.Nest:
    """Nest of `jax.ShapeDtypeStruct` of one unbatched core state, or `()`."""
    return self.module.core.state_spec()

  def initial_state(self, batch_size: int) -> types.Nest:
    """Core state at the start of an episode: zeros [N, ...], or `()`."""
    return jax.tree_util.tree_map(
      lambda s: jnp.zeros((batch_size, *s.shape), s.dtype),
      self.core_state_spec(),
    )

  def step(
    self,
    params: Params,
    observation: types.Nest,
    core_state: types.Nest,
    is_first: jax.Array,
  ) -> tuple[distributions.DistributionParams, jax.Array, types.Nest]:
    """One timestep of K environments.

    A trajectory that starts here must be stored with the state this call
    really used: the initial state where `is_first`, else `core_state`.

    Args:
      params: what `init` returned.
      observation: nest of [K, ...].
      core_state: nest of [K, ...], what the call before returned, or `()`.
      is_first: bool [K], True resets the core state before it is used.

    Returns:
      (distribution params of [K, ...], values f32 [K], next core state).
    """
    chex.assert_rank(is_first, 1)
    if jax.tree_util.tree_leaves(core_state):
      core_state = cores.select_state(
        is_first, self.initial_state(is_first.shape[0]), core_state
      )
    return self._apply(params, observation, core_state, method='step')

  def unroll(
    self,
    params: Params,
    observation: types.Nest,
    core_state: types.Nest,
    segment_ids: jax.Array,
    segment_positions: jax.Array,
  ) -> tuple[distributions.DistributionParams, jax.Array]:
    """All positions of packed rows.

    Args:
      params: what `init` returned.
      observation: nest of [B, L, ...].
      core_state: nest of [B, M, ...], state before each segment's first
        position, by segment id - 1; `()` for feed-forward networks.
      segment_ids: i32 [B, L], 0 is padding.
      segment_positions: i32 [B, L], 0 at the first position of a segment.

    Returns:
      (distribution params of [B, L, ...], values f32 [B, L]).
    """
    chex.assert_rank([segment_ids, segment_positions], 2)
    is_start = segment_positions == 0
    initial_state = jax.tree_util.tree_map(
      lambda x: _by_segment(x, segment_ids), core_state
    )
    return self._apply(
      params, observation, initial_state, is_start, method='unroll'
    )

  def _apply(self, params: Params, *args: Any, method: str) -> Any:
    return self.module.apply({'params': params}, *args, method=method)


def make_policy_network(
  environment_spec: specs.EnvironmentSpec,
  *,
  torso: str = 'auto',
  hidden_sizes: tuple[int, ...] = (64, 64),
  core: str = 'none',
  core_size: int = 64,
) -> PolicyNetwork:
  """Builds the network for an environment.

  Args:
    environment_spec: its observation and action specs size the network.
    torso: 'auto', 'mlp', 'impala' or 'atari'; see `torsos.make_torso`.
    hidden_sizes: layer sizes of the MLP torso, units.
    core: 'none', 'lstm' or 'gru'.
    core_size: size of the recurrent core, units.

  Raises:
    ValueError: an unknown name, or specs the parts cannot serve.
  """
  policy, distribution = heads.make_policy_head(environment_spec.action)
  module = _PolicyValueModule(
    torso=torsos.make_torso(
      torso, environment_spec.observation, hidden_sizes=hidden_sizes
    ),
    core=cores.make_core(core, size=core_size),
    policy=policy,
    value=heads.ValueHead(),
  )
  return PolicyNetwork(module, distribution, environment_spec)


def _by_segment(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """[B, M, ...] -> [B, L, ...], each position its segment's row of M."""
  index = jnp.maximum(segment_ids - 1, 0)
  return jax.vmap(lambda rows, i: rows[i])(x, index)
