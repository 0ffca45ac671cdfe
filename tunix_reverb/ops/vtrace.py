"""V-trace targets and advantages on rows that may hold many segments.

Letters: L positions of a row; `...` rows. Position t carries the transition
t -> t + 1; the last position of each segment, and padding, carry none. Rows may
be split over a mesh axis (see `recurrence.Rows`): L is then this device's part,
and results are those of the whole row.

Where the policy does not decide at every position, V-trace runs over the
decisions d_0, d_1, ... alone, as if nothing else were in the row: what follows
a decision is the discounted sum of the rewards up to the next one plus the
value there. A position between two decisions is an identity transition (rho =
c = lambda = 1), and its value is not read: no loss has trained it. Where such a
position has a ratio of its own (a later token of a turn), its outputs are the
target and the advantage which that ratio gives for what follows it.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tunix_reverb.ops import recurrence

# exp(+-20) is far outside any clip, and its square is still finite in float32.
MAX_ABS_LOG_RHO = 20.0


class VTraceOutput(NamedTuple):
  """V-trace targets of rows; no gradient flows through any of them.

  Attributes:
    vs: f32 [..., L], value targets. Equal to the value itself at the last
      position of a segment and on padding.
    advantages: f32 [..., L], for the policy gradient, before any rho; 0 where
      there is no transition.
    pg_advantages: f32 [..., L], those times the clipped rho.
    errors: f32 [..., L], vs - values.
    rhos: f32 [..., L], unclipped importance ratios; 0 where there is no
      transition.
    clipped_rhos: f32 [..., L], min(rho_bar, rhos).
  """

  vs: jax.Array
  advantages: jax.Array
  pg_advantages: jax.Array
  errors: jax.Array
  rhos: jax.Array
  clipped_rhos: jax.Array


def ratios(log_rhos: jax.Array) -> jax.Array:
  """exp(log_rhos), finite whatever they are; f32 of any shape."""
  return jnp.exp(jnp.clip(log_rhos, -MAX_ABS_LOG_RHO, MAX_ABS_LOG_RHO))


def transition_mask(
  segment_ids: jax.Array, rows: recurrence.Rows = recurrence.WHOLE
) -> jax.Array:
  """Where a row carries a transition t -> t + 1.

  Args:
    segment_ids: i32 [..., L], 1..S ascending, 0 is padding.
    rows: how the rows lie on the devices.

  Returns:
    bool [..., L], True where t and t + 1 belong to one segment.
  """
  return (segment_ids == rows.from_next(segment_ids)) & (segment_ids != 0)


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
  is_decision: jax.Array | None = None,
  rows: recurrence.Rows = recurrence.WHOLE,
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
    values: [..., L], value estimates.
    rewards: [..., L], reward of the transition t -> t + 1.
    discount_t: [..., L], environment discount times the discount factor.
    log_rhos: [..., L], log target probability minus log behaviour probability.
      Pass 0 where a transition must be the identity (rho = c = 1).
    is_transition: bool [..., L], see `transition_mask`.
    rho_bar: clip of rho in the temporal difference and in the advantage.
    c_bar: clip of the trace coefficient.
    lambda_: mixing of n-step targets.
    is_decision: bool [..., L], transitions at which traces are cut and values
      bootstrapped; None for all of them.
    rows: how the rows lie on the devices.

  Returns:
    `VTraceOutput`.
  """
  floats = (values, rewards, discount_t, log_rhos)
  chex.assert_equal_shape([*floats, is_transition])
  chex.assert_type(is_transition, bool)
  values, rewards, discount_t, log_rhos = (
    jax.lax.stop_gradient(x).astype(jnp.float32) for x in floats
  )
  # `where`, not a product: whatever lies on padding, even NaN, stays there.
  on_transition = lambda x: jnp.where(is_transition, x, jnp.zeros_like(x))
  rhos = on_transition(ratios(log_rhos))
  clipped_rhos = jnp.minimum(rho_bar, rhos)
  traces = on_transition(discount_t * lambda_ * jnp.minimum(c_bar, rhos))
  if is_decision is None:
    returns = rewards + discount_t * rows.from_next(values)
    deltas = on_transition(clipped_rhos * (returns - values))
    errors = rows.solve_backward(deltas, traces)
    next_errors = rows.from_next(errors)
  else:
    decided = is_decision & is_transition
    returns = _returns(
      values, rewards, discount_t, is_transition, decided, rows
    )
    deltas = on_transition(clipped_rhos * (returns - values))
    # Of the decision at t or, where there is none, of the next one.
    decision_errors = rows.solve_backward(
      jnp.where(decided, deltas, 0.0),
      jnp.where(decided, traces, on_transition(discount_t)),
    )
    next_errors = rows.from_next(decision_errors)
    errors = deltas + traces * next_errors
  # The last transition of a segment bootstraps from V itself; there the error
  # that follows is 0, so it needs no case of its own.
  advantages = on_transition(
    returns + discount_t * lambda_ * next_errors - values
  )
  vs, pg_advantages = values + errors, clipped_rhos * advantages
  return VTraceOutput(vs, advantages, pg_advantages, errors, rhos, clipped_rhos)


def _returns(
  values: jax.Array,
  rewards: jax.Array,
  discount_t: jax.Array,
  is_transition: jax.Array,
  is_decision: jax.Array,
  rows: recurrence.Rows,
) -> jax.Array:
  """Discounted rewards from t up to the next decision, and the value there.

  The next decision is after t; the end of the segment, which bootstraps it, is
  taken as one. 0 where there is no transition.
  """
  is_next = rows.from_next(is_decision | ~is_transition)
  next_values = jnp.where(is_next, rows.from_next(values), 0.0)
  on_transition = lambda x: jnp.where(is_transition, x, 0.0)
  return rows.solve_backward(
    on_transition(rewards + discount_t * next_values),
    on_transition(jnp.where(is_next, 0.0, discount_t)),
  )
