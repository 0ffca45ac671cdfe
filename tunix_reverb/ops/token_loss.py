"""The loss over rows of tokens, as sums.

The policy chose the tokens where `loss_mask` is True. What it is moved by, on
which advantages, is said in `policy_loss`. Advantages are given, or are those
of V-trace with a learned critic, and then values are trained as well.

In V-trace the other tokens, prompt and tool output, are identity transitions:
rho = c = 1, no lambda, no loss, and their values, which nothing trains, are not
read. The discount factor applies once on the way from one of the policy's
tokens to the next, on arrival there. So the loss is that of a process with only
the policy's tokens in it, and a reward that arrives on tool output is credited
as if it had come with the token before, however long the output is. (Espeholt
et al. 2018 for the maths, the docstring of `ops.vtrace` for how positions are
left out.)

Per turn, a turn is one decision and the product of its tokens' ratios its
ratio; clips, trace and lambda apply once for each turn. Every token of the turn
has that ratio and is compared to its own value, so the gradient is that of
log pi(turn) with a baseline that knows the tokens so far. The variance of the
product grows with the turn's length. 'turn_geometric' is the length-normalised
ratio of GSPO (Zheng et al. 2025, arXiv:2507.18071), taken per turn as by
Turn-PPO (Li et al. 2025, arXiv:2511.20718): biased, and tame at any length.
PPO's own ratio, to the proximal policy, is each token's.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from tunix_reverb.ops import losses
from tunix_reverb.ops import policy_loss
from tunix_reverb.ops import recurrence
from tunix_reverb.ops import turns
from tunix_reverb.ops import vtrace

Ratio = Literal['token', 'turn', 'turn_geometric']
RATIOS: tuple[Ratio, ...] = ('token', 'turn', 'turn_geometric')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLoss:
  """Which loss, and its constants.

  Attributes:
    discount_factor: the agent's, per token of the policy, whatever `ratio` is.
    rho_bar: see `vtrace.vtrace`.
    c_bar: see `vtrace.vtrace`.
    vtrace_lambda: see `vtrace.vtrace`; from token to token, or turn to turn.
    policy: what the policy is moved by.
    ratio: an importance ratio for each 'token' or 'turn', or for each turn the
      geometric mean over its tokens, 'turn_geometric'.
    rows: how the rows lie on the devices.
  """

  discount_factor: float
  rho_bar: float
  c_bar: float
  vtrace_lambda: float
  policy: policy_loss.PolicyLoss = policy_loss.VTRACE
  ratio: Ratio = 'token'
  rows: recurrence.Rows = recurrence.WHOLE

  def __post_init__(self) -> None:
    if self.ratio not in RATIOS:
      raise ValueError(
        f'ratio ({self.ratio!r}) must be one of {", ".join(RATIOS)}'
      )

  def sums(
    self,
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
    advantages: jax.Array | None = None,
    proximal_log_probs: jax.Array | None = None,
    is_current: jax.Array | None = None,
  ) -> losses.LossSums:
    """Over the policy's tokens; per turn, too, statistics count tokens.

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
      advantages: f32 [..., L]; None for those of V-trace.
      proximal_log_probs: f32 [..., L], of the policy that PPO stays close to;
        None for the target policy as it is. No other loss reads it.
      is_current: bool [..., L], where the target policy itself has acted; None
        if nobody says.

    Raises:
      ValueError: the ratio is per turn, and `turn_ids` are missing.
    """
    floats = (log_probs, entropies, values, discounts, behaviour_log_probs)
    chex.assert_equal_shape([*floats, rewards, loss_mask, segment_ids])
    log_probs, entropies, values, discounts, behaviour_log_probs = (
      x.astype(jnp.float32) for x in floats
    )
    is_transition = vtrace.transition_mask(segment_ids, self.rows)
    is_action = loss_mask & is_transition

    def by_action(target: jax.Array) -> jax.Array:
      return jnp.where(is_action, target - behaviour_log_probs, 0.0)

    def decisions(log_rhos: jax.Array) -> tuple[jax.Array, jax.Array]:
      return self._decisions(log_rhos, is_action, turn_ids, segment_ids)

    action_log_rhos = by_action(log_probs)
    log_rhos, is_decision = decisions(jax.lax.stop_gradient(action_log_rhos))
    vs = None
    if advantages is None:
      arrives = self.rows.from_next(is_action | ~is_transition)
      discount_t = discounts * jnp.where(arrives, self.discount_factor, 1.0)
      vs, advantages = self._targets(
        values, rewards, discount_t, log_rhos, is_transition, is_decision
      )
    log_weights = log_rhos
    if self.policy.kind == 'ppo' and proximal_log_probs is not None:
      log_weights, _ = decisions(by_action(proximal_log_probs))
    return losses.masked_sums(
      self._terms(log_probs, advantages, log_weights, proximal_log_probs),
      is_action,
      entropies=entropies,
      values=values,
      vs=vs,
      log_rhos=log_rhos,
      action_log_rhos=action_log_rhos,
      c_bar=self.c_bar,
      is_current=is_current,
    )

  def _terms(
    self,
    log_probs: jax.Array,
    advantages: jax.Array,
    log_rhos: jax.Array,
    proximal_log_probs: jax.Array | None,
  ) -> policy_loss.PolicyTerms:
    """See `policy_loss.policy_terms`."""
    return policy_loss.policy_terms(
      log_probs,
      advantages,
      log_rhos,
      proximal_log_probs,
      config=self.policy,
      rho_bar=self.rho_bar,
    )

  def _targets(
    self,
    values: jax.Array,
    rewards: jax.Array,
    discount_t: jax.Array,
    log_rhos: jax.Array,
    is_transition: jax.Array,
    is_decision: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """(what the values are to be, advantages): V-trace, or lambda-returns."""
    if self.policy.kind != 'vtrace':
      log_rhos = jnp.zeros_like(log_rhos)
    targets = vtrace.vtrace(
      values,
      rewards,
      discount_t,
      log_rhos,
      is_transition,
      rho_bar=self.rho_bar,
      c_bar=self.c_bar,
      lambda_=self.vtrace_lambda,
      is_decision=is_decision,
      rows=self.rows,
    )
    return targets.vs, targets.advantages

  def _decisions(
    self,
    log_rhos: jax.Array,
    is_action: jax.Array,
    turn_ids: jax.Array | None,
    segment_ids: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """(log ratio that each token takes, where the policy decides)."""
    if self.ratio == 'token':
      return log_rhos, is_action
    if turn_ids is None:
      raise ValueError(f'ratio ({self.ratio}) needs turn_ids: there are none')
    ratios = turns.turn_ratios(
      log_rhos, is_action, turn_ids, segment_ids, self.rows
    )
    of_turn = ratios.log_rhos
    if self.ratio == 'turn_geometric':
      of_turn = of_turn / jnp.maximum(ratios.lengths, 1.0)
    return jnp.where(is_action, of_turn, 0.0), ratios.is_first
