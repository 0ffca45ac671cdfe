"""What the policy is moved by: advantages, and how ratios weigh them.

Letters: `...` positions of any shape. For one action of probability pi under
the policy that is learnt, b under the one that chose it, and its advantage A,
the loss is, with rho the importance ratio pi / b (or that of its turn, see
`token_loss`) and no gradient through any weight:

  vtrace       min(rho_bar, rho) A (-log pi)
  tis          min(tis_cap, rho) A (-log pi): truncated importance sampling
  ppo          w max(-r A, -clip(r, 1 - low, 1 + high) A), with r = pi / p
  uncorrected  A (-log pi): for data of the policy itself

PPO is decoupled (Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu et al. 2025,
arXiv:2505.24298): p is the proximal policy, which trusts no step that goes too
far from it, and w = p / b corrects for who chose the action. p is what the
policy was before the first update on its batch, so an update alone has r = 1
and is not clipped. A weight above `behaviour_cap` is no longer trusted at all
and taken as 0 rather than cut, as in AReaL. The clip is asymmetric (DAPO, Yu et
al. 2025, arXiv:2503.14476), and an action with A < 0 loses no more than
-dual_clip A (Ye et al. 2020, arXiv:1912.09729).
"""

from __future__ import annotations

import dataclasses
from typing import Literal
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tunix_reverb.ops import vtrace

Kind = Literal['vtrace', 'tis', 'ppo', 'uncorrected']
KINDS: tuple[Kind, ...] = ('vtrace', 'tis', 'ppo', 'uncorrected')


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss:
  """Which loss, and its constants.

  Attributes:
    kind: see the module.
    tis_cap: of the ratio, with 'tis'.
    ppo_clip_low: how far r may fall below 1.
    ppo_clip_high: how far r may rise above 1.
    ppo_dual_clip: above 1; of r where the advantage is negative.
    ppo_behaviour_cap: largest weight w that is trusted.
  """

  kind: Kind = 'vtrace'
  tis_cap: float = 2.0
  ppo_clip_low: float = 0.2
  ppo_clip_high: float = 0.28
  ppo_dual_clip: float = 3.0
  ppo_behaviour_cap: float = 5.0

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise ValueError(
        f'kind ({self.kind!r}) must be one of {", ".join(KINDS)}'
      )


VTRACE = PolicyLoss()


class PolicyTerms(NamedTuple):
  """Of each action, f32 [...] unless said.

  Attributes:
    loss: what to minimise.
    is_capped: bool [...], its ratio is above the cap.
    is_clipped_high: bool [...], PPO's r is above 1 + high and A > 0: the policy
      has gone as far as it may and no gradient flows.
    is_clipped_low: bool [...], r is below 1 - low and A < 0, likewise.
    is_clipped_dual: bool [...], r is above the dual clip and A < 0, likewise.
  """

  loss: jax.Array
  is_capped: jax.Array
  is_clipped_high: jax.Array
  is_clipped_low: jax.Array
  is_clipped_dual: jax.Array


def policy_terms(
  log_probs: jax.Array,
  advantages: jax.Array,
  log_rhos: jax.Array,
  proximal_log_probs: jax.Array | None = None,
  *,
  config: PolicyLoss,
  rho_bar: float,
) -> PolicyTerms:
  """The losses of actions by themselves; whoever sums them masks them.

  Args:
    log_probs: f32 [...], log pi; gradients flow through it alone.
    advantages: f32 [...].
    log_rhos: f32 [...], log importance ratios; with 'ppo' those of p to b.
    proximal_log_probs: f32 [...], log p; None if p is pi as it is. Only read
      with 'ppo'.
    config: which loss.
    rho_bar: the cap with 'vtrace'.

  Returns:
    `PolicyTerms`.
  """
  chex.assert_equal_shape([log_probs, advantages, log_rhos])
  chex.assert_type([log_probs, advantages, log_rhos], jnp.float32)
  advantages, log_rhos = jax.lax.stop_gradient((advantages, log_rhos))
  rhos = vtrace.ratios(log_rhos)
  if config.kind == 'ppo':
    if proximal_log_probs is None:
      proximal_log_probs = log_probs
    chex.assert_equal_shape([log_probs, proximal_log_probs])
    r = vtrace.ratios(log_probs - jax.lax.stop_gradient(proximal_log_probs))
    return _ppo_terms(r, advantages, rhos, config)
  never = jnp.zeros(log_probs.shape, bool)
  loss, is_capped = -log_probs * advantages, never
  if config.kind != 'uncorrected':
    cap = rho_bar if config.kind == 'vtrace' else config.tis_cap
    loss, is_capped = jnp.minimum(cap, rhos) * loss, rhos > cap
  return PolicyTerms(loss, is_capped, never, never, never)


def _ppo_terms(
  r: jax.Array, advantages: jax.Array, weights: jax.Array, config: PolicyLoss
) -> PolicyTerms:
  """See `policy_terms`; gradients flow through r."""
  lowest, highest = 1.0 - config.ppo_clip_low, 1.0 + config.ppo_clip_high
  is_capped = weights > config.ppo_behaviour_cap
  loss = jnp.maximum(
    -r * advantages, -jnp.clip(r, lowest, highest) * advantages
  )
  is_bad = advantages < 0
  most = -config.ppo_dual_clip * advantages
  loss = jnp.where(is_bad, jnp.minimum(loss, most), loss)
  return PolicyTerms(
    jnp.where(is_capped, 0.0, weights) * loss,
    is_capped,
    (r > highest) & (advantages > 0),
    (r < lowest) & is_bad,
    (r > config.ppo_dual_clip) & is_bad,
  )
