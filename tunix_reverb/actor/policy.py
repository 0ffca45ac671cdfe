"""The behaviour policy: one jitted, statically shaped call for N environments.

Letters: N environments, K of them answering at once.
"""

from __future__ import annotations

from typing import Any
from typing import Protocol

import jax
import numpy as np
import tree

from tunix_reverb import types


class ActingNetwork(Protocol):
  """What acting needs of a policy network (see `networks.policy_network`)."""

  distribution: Any

  def step(
    self, params: Any, observation: Any, core_state: Any, is_first: Any
  ) -> tuple[Any, Any, Any]:
    """(distribution params, value [K], core state) for K environments."""

  def initial_state(self, batch_size: int) -> Any:
    """Recurrent state of `batch_size` fresh episodes."""


class BatchedPolicy:
  """Acts for up to N environments at once; every call has the shape [N, ...].

  Fewer than N observations are padded, so that one compiled program serves
  every call. The recurrent state of each environment is kept here.

  With `independent` environments, what one is answered depends on nothing but
  the variables, the seed and its own past: not on which others are in the call.
  """

  def __init__(
    self,
    network: ActingNetwork,
    *,
    num_environments: int,
    seed: int,
    greedy: bool = False,
    independent: bool = False,
  ):
    """A policy without variables yet: call `set_variables` first.

    Args:
      network: the policy network.
      num_environments: N.
      seed: of the action sampling.
      greedy: takes the most likely action instead of sampling.
      independent: keys and rows of its own for each environment; slower.
    """
    self._num = num_environments
    self._key = jax.random.PRNGKey(seed)
    self._calls = 0
    self._params: Any = None
    self.policy_version = 0
    self._initial_state = tree.map_structure(
      np.array, network.initial_state(num_environments)
    )
    self._core_state = tree.map_structure(np.copy, self._initial_state)
    self._is_recurrent = bool(tree.flatten(self._core_state))
    # Calls that each environment was in; None if they share their keys.
    self._counts = (
      np.zeros(num_environments, np.uint32) if independent else None
    )
    sample = _sample_each if independent else _sample
    self._act = jax.jit(_make_act(network, None if greedy else sample))

  def set_variables(self, variables: types.Variables) -> None:
    """Acts with `variables` from the next call on."""
    self._params = jax.device_put(variables.params)
    self.policy_version = variables.policy_version

  def core_state_before(
    self, environment_ids: np.ndarray, is_first: np.ndarray
  ) -> types.Nest:
    """The recurrent state that the next action will see.

    Args:
      environment_ids: i32 [K].
      is_first: bool [K], True where an episode starts.

    Returns:
      nest of [K, ...]; `()` for feed-forward networks.
    """

    if not self._is_recurrent:
      return ()

    def before(kept: np.ndarray, initial: np.ndarray) -> np.ndarray:
      kept[environment_ids[is_first]] = initial[0]
      return kept[environment_ids]

    return tree.map_structure(before, self._core_state, self._initial_state)

  def act(
    self,
    environment_ids: np.ndarray,
    observation: types.Nest,
    is_first: np.ndarray,
  ) -> types.PolicyOutput:
    """Chooses actions for K environments.

    Args:
      environment_ids: i32 [K], all different.
      observation: nest of [K, ...].
      is_first: bool [K], True where an episode starts: there the recurrent
        state is reset.

    Returns:
      Host arrays; `core_state` [K, ...] is the state after this call.
    """
    if self._counts is not None:
      return self._act_for_each(environment_ids, observation, is_first)
    count = environment_ids.size
    core_state = self.core_state_before(environment_ids, is_first)
    inputs = (observation, core_state, is_first)
    if count < self._num:
      pad = lambda a: np.concatenate(
        [a, np.zeros((self._num - count, *a.shape[1:]), a.dtype)]
      )
      inputs = tree.map_structure(pad, inputs)
    self._calls += 1
    output = self._act(self._params, self._key, np.uint32(self._calls), *inputs)
    # Leaf by leaf: `jax.device_get` costs a third of a small policy's call.
    action, log_prob = np.asarray(output.action), np.asarray(output.log_prob)
    if count < self._num:
      action, log_prob = action[:count], log_prob[:count]
    if self._is_recurrent:
      core_state = tree.map_structure(
        lambda s: np.asarray(s)[:count], output.core_state
      )
      tree.map_structure(
        lambda kept, new: kept.__setitem__(environment_ids, new),
        self._core_state,
        core_state,
      )
    return types.PolicyOutput(action, log_prob, core_state)

  def _act_for_each(
    self,
    environment_ids: np.ndarray,
    observation: types.Nest,
    is_first: np.ndarray,
  ) -> types.PolicyOutput:
    """Like `act`, each environment in the row of its id, [N, ...]."""
    core_state = self.core_state_before(environment_ids, is_first)

    def spread(values: np.ndarray) -> np.ndarray:
      rows = np.zeros((self._num, *values.shape[1:]), values.dtype)
      rows[environment_ids] = values
      return rows

    inputs = tree.map_structure(spread, (observation, core_state, is_first))
    self._counts[environment_ids] += 1
    # A copy: the call may still read it when the next one counts on.
    output = self._act(self._params, self._key, self._counts.copy(), *inputs)
    gather = lambda values: np.asarray(values)[environment_ids]
    output = jax.tree_util.tree_map(gather, output)
    tree.map_structure(
      lambda kept, new: kept.__setitem__(environment_ids, new),
      self._core_state,
      output.core_state,
    )
    return output


def _sample(
  distribution: Any, outputs: Any, key: jax.Array, call: jax.Array
) -> jax.Array:
  """One key for all."""
  return distribution.sample(outputs, key=jax.random.fold_in(key, call))


def _sample_each(
  distribution: Any, outputs: Any, key: jax.Array, counts: jax.Array
) -> jax.Array:
  """A key for each environment, of its id and its count of calls, [N]."""

  def sample(outputs, environment_id, count):
    own = jax.random.fold_in(key, environment_id)
    return distribution.sample(outputs, key=jax.random.fold_in(own, count))

  return jax.vmap(sample)(outputs, np.arange(counts.size), counts)


def _make_act(network: ActingNetwork, sample: Any) -> Any:
  """The program of a call; without `sample` it takes the likeliest action."""
  distribution = network.distribution

  def act(params, key, call, observation, core_state, is_first):
    outputs, _, core_state = network.step(
      params, observation, core_state, is_first
    )
    if sample is None:
      action = distribution.mode(outputs)
    else:
      action = sample(distribution, outputs, key, call)
    return types.PolicyOutput(
      action=action,
      log_prob=distribution.log_prob(outputs, action),
      core_state=core_state,
    )

  return act
