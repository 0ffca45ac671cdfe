"""V-trace targets and advantages on one stream that may hold many segments.

Letters: L positions of one row. Position t carries the transition t -> t + 1;
the last position of each segment, and padding, carry none.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

# exp(+-20) is far outside any clip, and its square is still finite in float32.
MAX_ABS_LOG_RHO = 20.0
# Measured on CPU: about 3 times faster than no unrolling at long L.
_SCAN_UNROLL = 8


class VTraceOutput(NamedTuple):
  """V-trace targets of one row; no gradient flows through any of them.

  Attributes:
    vs: f32 [L], value targets. Equal to the value itself at the last position
      of a segment and on padding.
    pg_advantages: f32 [L], advantages for the policy gradient, already times
      the clipped rho; 0 where there is no transition.
    errors: f32 [L], vs - values.
    rhos: f32 [L], unclipped importance ratios; 0 where there is no transition.
    clipped_rhos: f32 [L], min(rho_bar, rhos).
  """

  vs: jax.Array
  pg_advantages: jax.Array
  errors: jax.Array
  rhos: jax.Array
  clipped_rhos: jax.Array


def transition_mask(segment_ids: jax.Array) -> jax.Array:
  """Where a row carries a transition t -> t + 1.

  Args:
    segment_ids: i32 [L], 1..S ascending, 0 is padding.

  Returns:
    bool [L], True where t and t + 1 belong to one segment.
  """
  chex.assert_rank(segment_ids, 1)
  same = (segment_ids[:-1] == segment_ids[1:]) & (segment_ids[:-1] != 0)
  return jnp.concatenate([same, jnp.zeros((1,), jnp.bool_)])


def vtrace(
  values: jax.Array,
  rewards: jax.Array,
  discount_t: jax.Array,
  log_rhos: jax.Array,
  is_transition: jax.Array,
  *,
  rho_bar: float = 1.0,
  c_bar: float = 1.0,
  lambda_: float = 1.0,
) -> VTraceOutput:
  """Computes V-trace targets (Espeholt et al. 2018, section 4.1).

    delta_t = min(rho_bar, rho_t) (r_t + discount_t V_{t+1} - V_t)
    c_t = lambda min(c_bar, rho_t)
    vs_t - V_t = delta_t + discount_t c_t (vs_{t+1} - V_{t+1})

  Everything is 0 outside transitions, so that the value of a segment's last
  position bootstraps it and nothing leaks into its neighbour. With lambda < 1
  the advantage mixes vs_{t+1} with V_{t+1}, as rlax does. We diverge from rlax
  in computing in float32 whatever the inputs (bfloat16 is off by more than 1
  at discount = lambda = 1) and in clamping log-ratios to +-20 before `exp`.

  Args:
    values: [L], value estimates.
    rewards: [L], reward of the transition t -> t + 1.
    discount_t: [L], environment discount times the discount factor.
    log_rhos: [L], log target probability minus log behaviour probability. Pass
      0 where a transition must be the identity (rho = c = 1).
    is_transition: bool [L], see `transition_mask`.
    rho_bar: clip of rho in the temporal difference and in the advantage.
    c_bar: clip of the trace coefficient.
    lambda_: mixing of n-step targets.

  Returns:
    `VTraceOutput`.
  """
  arrays = [values, rewards, discount_t, log_rhos, is_transition]
  chex.assert_rank(arrays, 1)
  chex.assert_equal_shape(arrays)
  chex.assert_type(is_transition, bool)

  as_f32 = lambda x: jax.lax.stop_gradient(x).astype(jnp.float32)
  values, rewards, discount_t, log_rhos = map(
    as_f32, (values, rewards, discount_t, log_rhos)
  )
  # `where`, not a product: whatever lies on padding, even NaN, stays there.
  on_transition = lambda x: jnp.where(is_transition, x, jnp.zeros_like(x))

  rhos = on_transition(
    jnp.exp(jnp.clip(log_rhos, -MAX_ABS_LOG_RHO, MAX_ABS_LOG_RHO))
  )
  clipped_rhos = jnp.minimum(rho_bar, rhos)
  next_values = _shift(values)
  deltas = on_transition(
    clipped_rhos * (rewards + discount_t * next_values - values)
  )
  traces = on_transition(discount_t * lambda_ * jnp.minimum(c_bar, rhos))
  errors = _discounted_sum(deltas, traces)
  vs = values + errors
  next_targets = lambda_ * _shift(vs) + (1.0 - lambda_) * next_values
  # The last transition of a segment bootstraps from V itself; there both
  # terms of the mix are equal, so it needs no case of its own.
  pg_advantages = on_transition(
    clipped_rhos * (rewards + discount_t * next_targets - values)
  )
  return VTraceOutput(vs, pg_advantages, errors, rhos, clipped_rhos)


def _shift(x: jax.Array) -> jax.Array:
  """x_{t+1} at t; the last entry repeats and must be masked."""
  return jnp.concatenate([x[1:], x[-1:]])


def _discounted_sum(deltas: jax.Array, traces: jax.Array) -> jax.Array:
  """Solves y_t = deltas_t + traces_t y_{t+1} backwards; all [L]."""

  def body(
    accumulator: jax.Array, inputs: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    delta, trace = inputs
    accumulator = delta + trace * accumulator
    return accumulator, accumulator

  _, sums = jax.lax.scan(
    body,
    jnp.zeros((), jnp.float32),
    (deltas, traces),
    reverse=True,
    unroll=_SCAN_UNROLL,
  )
  return sums
