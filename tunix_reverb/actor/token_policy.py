"""The behaviour policy of token environments: a transformer and its cache.

Serves the loops in place of `policy.BatchedPolicy`. Each of N environments has
a slot of the cache; a call reads one token of each environment that answers, a
prompt's as well as the policy's own, and says the next. All shapes are fixed,
so one program serves every call, wherever each sequence is. Letters: N
environments, K of them answering at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import decoding


class TokenPolicy:
  """Samples tokens; newer variables are taken between any two of them.

  What an environment is answered depends on nothing but the variables, the seed
  and its own past: not on which others are in the call. Keys and values that
  older variables have computed stay in the cache until the episode ends.
  """

  def __init__(
    self,
    config: config_lib.TransformerConfig,
    *,
    num_environments: int,
    max_length: int,
    dtype: str,
    seed: int,
    greedy: bool = False,
  ):
    """A policy without variables yet: call `set_variables` first.

    Args:
      config: what the model is.
      num_environments: N.
      max_length: most tokens of an episode, positions.
      dtype: of the computation inside the blocks, as the learner's.
      seed: of the sampling.
      greedy: takes the most likely token instead of sampling.
    """
    self._key = jax.random.PRNGKey(seed)
    self._params: Any = None
    self.policy_version = 0
    self._max_length = max_length
    self._cache = decoding.empty_cache(
      config, num_slots=num_environments, length=max_length, dtype=dtype
    )
    # The latest token that was read of each environment, its position, and the
    # number of tokens said.
    self._tokens = np.zeros(num_environments, np.int32)
    self._positions = np.full(num_environments, -1, np.int32)
    self._counts = np.zeros(num_environments, np.uint32)
    self._act = jax.jit(
      _make_act(config, greedy=greedy), donate_argnames='cache'
    )

  def set_variables(self, variables: types.Variables) -> None:
    """Acts with `variables` from the next call on."""
    self._params = decoding.prepare(
      jax.device_put(variables.params), self._cache.keys.dtype
    )
    self.policy_version = variables.policy_version

  def core_state_before(
    self, environment_ids: np.ndarray, is_first: np.ndarray
  ) -> types.Nest:
    """`()`: the past is in the tokens."""
    del environment_ids, is_first
    return ()

  def act(
    self,
    environment_ids: np.ndarray,
    observation: types.Nest,
    is_first: np.ndarray,
  ) -> types.PolicyOutput:
    """Says the next token of K environments.

    Args:
      environment_ids: i32 [K], all different.
      observation: dict with `token`, integers [K].
      is_first: bool [K], True where an episode starts.

    Returns:
      Host arrays: action i32 [K] and its log_prob f32 [K]; no core_state.

    Raises:
      errors.UserError: an episode is longer than the cache.
    """
    before = np.where(is_first, -1, self._positions[environment_ids])
    if before.size and int(before.max()) + 1 >= self._max_length:
      raise errors.UserError(
        f'trajectory_length ({self._max_length - 1}) must hold every episode '
        'of tokens whole, and one is longer: raise it'
      )
    self._positions[environment_ids] = before + 1
    self._tokens[environment_ids] = observation['token']
    self._counts[environment_ids] += 1
    # Slots that are not asked write where their next token will.
    positions = np.minimum(self._positions + 1, self._max_length - 1)
    positions[environment_ids] = before + 1
    # Copies: the call may still read them when the next one counts on.
    action, log_prob, self._cache = self._act(
      self._params,
      self._key,
      cache=self._cache,
      tokens=self._tokens.copy(),
      positions=positions,
      counts=self._counts.copy(),
    )
    action, log_prob = np.asarray(action), np.asarray(log_prob)
    return types.PolicyOutput(
      action[environment_ids], log_prob[environment_ids], core_state=()
    )


def _make_act(config: config_lib.TransformerConfig, *, greedy: bool) -> Any:
  """The program of a call, of [N]."""

  def act(params, key, *, cache, tokens, positions, counts):
    slots = jnp.arange(tokens.size, dtype=jnp.int32)
    reading = decoding.Reading(
      slots, tokens[:, None], positions, jnp.ones_like(tokens)
    )
    log_probs, cache = decoding.read(config, params, cache, reading)
    if greedy:
      action = jnp.argmax(log_probs, axis=-1)
    else:
      action = jax.vmap(_sample, in_axes=(None, 0, 0, 0))(
        key, jnp.arange(counts.size), counts, log_probs
      )
    log_prob = jnp.take_along_axis(log_probs, action[:, None], axis=-1)[:, 0]
    return action.astype(jnp.int32), log_prob, cache

  return act


def _sample(
  key: jax.Array, slot: jax.Array, count: jax.Array, log_probs: jax.Array
) -> jax.Array:
  """A key for each slot and each of its tokens; log_probs [V]."""
  key = jax.random.fold_in(jax.random.fold_in(key, slot), count)
  return jax.random.categorical(key, log_probs)
