"""The V-trace actor-critic loss over rows of tokens, as sums.

The policy chose the tokens where `loss_mask` is True. The others, prompt and
tool output, are identity transitions: rho = c = 1, no lambda, no loss, and
their values, which nothing trains, are not read. The discount factor applies
once on the way from one of the policy's tokens to the next, on arrival there.
So the loss is that of a process with only the policy's tokens in it, and a
reward that arrives on tool output is credited as if it had come with the token
before, however long the output is. (Espeholt et al. 2018 for the maths, the
docstring of `ops.vtrace` for how positions are left out.)

Per turn, a turn is one decision and the product of its tokens' ratios its
ratio; clips, trace and lambda apply once for each turn. Every token of the turn
has that ratio and is compared to its own value, so the gradient is that of
log pi(turn) with a baseline that knows the tokens so far. The variance of the
product grows with the turn's length. 'turn_geometric' is the length-normalised
ratio of GSPO (Zheng et al. 2025, arXiv:2507.18071), taken per turn as by
Turn-PPO (Li et al. 2025, arXiv:2511.20718): biased, and tame at any length.
"""

from __future__ import annotations

from typing import Literal

import chex
import jax
import jax.numpy as jnp

from tunix_reverb.ops import losses
from tunix_reverb.ops import recurrence
from tunix_reverb.ops import turns
from tunix_reverb.ops import vtrace

Ratio = Literal['token', 'turn', 'turn_geometric']


def vtrace_token_loss(
  log_probs: jax.Array,
  entropies: jax.Array,
  values: jax.Array,
  *,
  rewards: jax.Array,
  discounts: jax.Array,
  behaviour_log_probs: jax.Array,
  loss_mask: jax.Array,
  segment_ids: jax.Array,
  turn_ids: jax.Array | None = None,
  ratio: Ratio = 'token',
  discount_factor: float,
  rho_bar: float,
  c_bar: float,
  vtrace_lambda: float,
  rows: recurrence.Rows = recurrence.WHOLE,
) -> losses.LossSums:
  """The sums over the policy's tokens; per turn, too, statistics count tokens.

  Args:
    log_probs: f32 [..., L], of the next token under the target policy.
    entropies: f32 [..., L], of the target policy.
    values: f32 [..., L].
    rewards: f32 [..., L].
    discounts: f32 [..., L], the environment's.
    behaviour_log_probs: f32 [..., L].
    loss_mask: bool [..., L].
    segment_ids: i32 [..., L], 0 is padding.
    turn_ids: i32 [..., L], see `turns.turn_ratios`; not read per token.
    ratio: an importance ratio for each 'token' or 'turn', or for each turn the
      geometric mean over its tokens, 'turn_geometric'.
    discount_factor: the agent's, per token of the policy, whatever `ratio` is.
    rho_bar: see `vtrace.vtrace`.
    c_bar: see `vtrace.vtrace`.
    vtrace_lambda: see `vtrace.vtrace`; from token to token, or turn to turn.
    rows: how the rows lie on the devices.

  Raises:
    ValueError: `ratio` is unknown, or is per turn and `turn_ids` are missing.
  """
  floats = (log_probs, entropies, values, discounts, behaviour_log_probs)
  chex.assert_equal_shape([*floats, rewards, loss_mask, segment_ids])
  log_probs, entropies, values, discounts, behaviour_log_probs = (
    x.astype(jnp.float32) for x in floats
  )
  is_transition = vtrace.transition_mask(segment_ids, rows)
  is_action = loss_mask & is_transition
  log_rhos = jnp.where(
    is_action, jax.lax.stop_gradient(log_probs) - behaviour_log_probs, 0.0
  )
  log_rhos, is_decision = _decisions(
    log_rhos, is_action, turn_ids, segment_ids, ratio, rows
  )
  arrives = rows.from_next(is_action | ~is_transition)
  targets = vtrace.vtrace(
    values,
    rewards,
    jnp.where(arrives, discounts * discount_factor, discounts),
    log_rhos,
    is_transition,
    rho_bar=rho_bar,
    c_bar=c_bar,
    lambda_=vtrace_lambda,
    is_decision=is_decision,
    rows=rows,
  )
  return losses.masked_sums(
    log_probs,
    entropies,
    values,
    targets,
    is_action,
    rho_bar=rho_bar,
    c_bar=c_bar,
  )


def _decisions(
  log_rhos: jax.Array,
  is_action: jax.Array,
  turn_ids: jax.Array | None,
  segment_ids: jax.Array,
  ratio: Ratio,
  rows: recurrence.Rows,
) -> tuple[jax.Array, jax.Array]:
  """(log ratio that each token takes, where the policy decides)."""
  if ratio == 'token':
    return log_rhos, is_action
  if ratio not in ('turn', 'turn_geometric'):
    raise ValueError(
      f"ratio ({ratio}) must be 'token', 'turn' or 'turn_geometric'"
    )
  if turn_ids is None:
    raise ValueError(f'ratio ({ratio}) needs turn_ids, and there are none')
  ratios = turns.turn_ratios(log_rhos, is_action, turn_ids, segment_ids, rows)
  of_turn = ratios.log_rhos
  if ratio == 'turn_geometric':
    of_turn = of_turn / jnp.maximum(ratios.lengths, 1.0)
  return jnp.where(is_action, of_turn, 0.0), ratios.is_first
