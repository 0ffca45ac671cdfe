"""Sums of a loss over rows, and those of the V-trace actor-critic loss.

Sums, not means: the denominator is global over rows and devices, so whoever
holds the mesh divides, by a count taken before anything is rejected. Letters:
L positions of a row; `...` rows: [L] is one, [B, L] a batch, which is faster as
it is than under `vmap`. Of rows that are split over a mesh axis (see
`recurrence.Rows`) each device returns the sums over its part.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tunix_reverb.ops import policy_loss
from tunix_reverb.ops import recurrence
from tunix_reverb.ops import vtrace


class LossSums(NamedTuple):
  """Sums over the transitions that count in the loss; f32 scalars.

  Gradients flow through `pg_loss`, `baseline_loss`, `entropy` and `k2` only.

  Attributes:
    pg_loss: what the policy is moved by, see `policy_loss`.
    baseline_loss: 0.5 (vs - V)^2; 0 where advantages are given.
    entropy: of the target policy, nats.
    num_transitions: how many transitions are summed over.
    rho: importance ratios, unclipped.
    rho_squared: their squares; (sum rho)^2 / (num_transitions sum rho^2) is the
      effective sample size as a fraction.
    rho_clipped: number of ratios above the cap of the loss.
    log_rho: logarithms of the ratios; its negative mean estimates the KL
      divergence of the behaviour from the target policy.
    k2: (log rho)^2 / 2, of each action by itself: another estimate of it, which
      pulls the target policy back to the behaviour policy however small the
      ratio has become, and not at all where both agree.
    k3: rho - 1 - log rho: a third estimate, with less variance than the first
      and never below 0 (Schulman 2020, "Approximating KL divergence", for all).
    c: trace coefficients min(c_bar, rho), without lambda.
    c_clipped: number of ratios above c_bar.
    value: value estimates; 0 where advantages are given.
    clipped_high: number of actions that PPO's clip stops from above.
    clipped_low: those that it stops from below.
    clipped_dual: those that its dual clip stops.
    num_current: transitions acted out by the very params that are learnt; of
      these the next two.
    mismatch: distance of the logarithm of the ratio, which should be 1, to 0.
    mismatch_k3: as `k3`.
  """

  pg_loss: jax.Array
  baseline_loss: jax.Array
  entropy: jax.Array
  num_transitions: jax.Array
  rho: jax.Array
  rho_squared: jax.Array
  rho_clipped: jax.Array
  log_rho: jax.Array
  k2: jax.Array
  k3: jax.Array
  c: jax.Array
  c_clipped: jax.Array
  value: jax.Array
  clipped_high: jax.Array
  clipped_low: jax.Array
  clipped_dual: jax.Array
  num_current: jax.Array
  mismatch: jax.Array
  mismatch_k3: jax.Array


def shape_rewards(
  rewards: jax.Array, *, reward_clip: float, reward_scale: float
) -> jax.Array:
  """Rewards as the loss sees them, of any shape.

  Args:
    rewards: f32 [...].
    reward_clip: rewards are clipped to +-this; 0 leaves them alone.
    reward_scale: rewards are multiplied by this, after the clip.
  """
  if reward_clip > 0:
    rewards = jnp.clip(rewards, -reward_clip, reward_clip)
  return rewards * reward_scale


def vtrace_actor_critic_loss(
  log_probs: jax.Array,
  entropies: jax.Array,
  values: jax.Array,
  *,
  rewards: jax.Array,
  discounts: jax.Array,
  behaviour_log_probs: jax.Array,
  loss_mask: jax.Array,
  segment_ids: jax.Array,
  discount_factor: float,
  rho_bar: float,
  c_bar: float,
  vtrace_lambda: float,
  rows: recurrence.Rows = recurrence.WHOLE,
) -> LossSums:
  """The loss of Espeholt et al. 2018, section 4.2, over packed rows.

  Transitions with a False `loss_mask` stay in the trace as if on policy (their
  ratio is 1; time passes, so discount and lambda apply) and out of every sum.

  Args:
    log_probs: f32 [..., L], of the actions under the target policy.
    entropies: f32 [..., L], of the target policy.
    values: f32 [..., L].
    rewards: f32 [..., L].
    discounts: f32 [..., L], the environment's.
    behaviour_log_probs: f32 [..., L].
    loss_mask: bool [..., L].
    segment_ids: i32 [..., L], 0 is padding.
    discount_factor: the agent's constant.
    rho_bar: see `vtrace.vtrace`.
    c_bar: see `vtrace.vtrace`.
    vtrace_lambda: see `vtrace.vtrace`.
    rows: how the rows lie on the devices.

  Returns:
    `LossSums`.
  """
  floats = (log_probs, entropies, values, discounts, behaviour_log_probs)
  chex.assert_equal_shape([*floats, rewards, loss_mask, segment_ids])
  log_probs, entropies, values, discounts, behaviour_log_probs = (
    x.astype(jnp.float32) for x in floats
  )
  is_transition = vtrace.transition_mask(segment_ids, rows)
  mask = loss_mask & is_transition
  action_log_rhos = jnp.where(mask, log_probs - behaviour_log_probs, 0.0)
  log_rhos = jax.lax.stop_gradient(action_log_rhos)
  targets = vtrace.vtrace(
    values,
    rewards,
    discounts * discount_factor,
    log_rhos,
    is_transition,
    rho_bar=rho_bar,
    c_bar=c_bar,
    lambda_=vtrace_lambda,
    rows=rows,
  )
  terms = policy_loss.policy_terms(
    log_probs,
    targets.advantages,
    log_rhos,
    config=policy_loss.VTRACE,
    rho_bar=rho_bar,
  )
  return masked_sums(
    terms,
    mask,
    entropies=entropies,
    values=values,
    vs=targets.vs,
    log_rhos=log_rhos,
    action_log_rhos=action_log_rhos,
    c_bar=c_bar,
  )


def masked_sums(
  terms: policy_loss.PolicyTerms,
  mask: jax.Array,
  *,
  entropies: jax.Array,
  values: jax.Array,
  vs: jax.Array | None,
  log_rhos: jax.Array,
  action_log_rhos: jax.Array,
  c_bar: float,
  is_current: jax.Array | None = None,
) -> LossSums:
  """Sums over the positions where `mask` is True; all [..., L].

  Args:
    terms: of the policy.
    mask: bool.
    entropies: f32.
    values: f32.
    vs: f32, what the values are to be; None trains no values.
    log_rhos: f32, of the statistics.
    action_log_rhos: f32, of each action by itself; gradients flow through it.
    c_bar: of the statistics.
    is_current: bool, where the target policy itself has acted; None if nobody
      says.
  """
  # `where`, not a product: what lies under the mask may be NaN.
  masked_sum = lambda x: jnp.sum(jnp.where(mask, x, jnp.zeros_like(x)))
  count = lambda x: jnp.sum((mask & x).astype(jnp.float32))
  rhos = vtrace.ratios(log_rhos)
  zero = jnp.zeros((), jnp.float32)
  return LossSums(
    pg_loss=masked_sum(terms.loss),
    baseline_loss=(
      zero if vs is None else masked_sum(0.5 * jnp.square(vs - values))
    ),
    entropy=masked_sum(entropies),
    num_transitions=count(mask),
    rho=masked_sum(rhos),
    rho_squared=masked_sum(jnp.square(rhos)),
    rho_clipped=count(terms.is_capped),
    log_rho=masked_sum(jnp.log(rhos)),
    k2=masked_sum(0.5 * jnp.square(action_log_rhos)),
    k3=masked_sum(rhos - 1.0 - jnp.log(rhos)),
    c=masked_sum(jnp.minimum(c_bar, rhos)),
    c_clipped=count(rhos > c_bar),
    value=zero if vs is None else masked_sum(jax.lax.stop_gradient(values)),
    clipped_high=count(terms.is_clipped_high),
    clipped_low=count(terms.is_clipped_low),
    clipped_dual=count(terms.is_clipped_dual),
    **_mismatch(jax.lax.stop_gradient(action_log_rhos), mask, is_current),
  )


def _mismatch(
  log_rhos: jax.Array, mask: jax.Array, is_current: jax.Array | None
) -> dict[str, jax.Array]:
  """Sums over the positions where the target policy acted; see `LossSums`."""
  if is_current is None:
    zero = jnp.zeros((), jnp.float32)
    return {'num_current': zero, 'mismatch': zero, 'mismatch_k3': zero}
  mask = mask & is_current
  log_rhos = jnp.where(mask, log_rhos, 0.0)
  return {
    'num_current': jnp.sum(mask.astype(jnp.float32)),
    'mismatch': jnp.sum(jnp.abs(log_rhos)),
    'mismatch_k3': jnp.sum(vtrace.ratios(log_rhos) - 1.0 - log_rhos),
  }
