"""The losses of single actions against NumPy, in value and in gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb.agents.transformer import config as transformer_config
from tunix_reverb.ops import policy_loss
from tunix_reverb.ops import token_loss

_RHO_BAR = 1.1


def _actions(size=200, seed=0):
  """(log_probs, advantages, behaviour and proximal log-probs), f32 [N]."""
  rng = np.random.default_rng(seed)
  normal = lambda scale: (scale * rng.normal(size=size)).astype(np.float32)
  log_probs = -np.abs(normal(1.0)) - np.float32(0.5)
  return (
    log_probs,
    normal(1.0),
    log_probs + normal(1.0),
    log_probs + normal(0.6),
  )


def _terms(kind, *, with_proximal=True, **constants):
  log_probs, advantages, behaviour, proximal = _actions()
  target = proximal if kind == 'ppo' and with_proximal else log_probs

  def total(x):
    terms = policy_loss.policy_terms(
      x,
      jnp.asarray(advantages),
      jnp.asarray(target - behaviour),
      jnp.asarray(proximal) if with_proximal else None,
      config=policy_loss.PolicyLoss(kind=kind, **constants),
      rho_bar=_RHO_BAR,
    )
    return jnp.sum(terms.loss), terms

  gradient, terms = jax.grad(total, has_aux=True)(jnp.asarray(log_probs))
  return terms, np.asarray(gradient)


@pytest.mark.parametrize(
  ('kind', 'cap'), [('vtrace', _RHO_BAR), ('tis', 2.0), ('uncorrected', None)]
)
def test_weighs_the_policy_gradient_by_the_capped_ratio(kind, cap):
  log_probs, advantages, behaviour, _ = (np.float64(x) for x in _actions())
  rhos = np.exp(log_probs - behaviour)
  weights = np.ones_like(rhos) if cap is None else np.minimum(cap, rhos)
  terms, gradient = _terms(kind)
  np.testing.assert_allclose(
    terms.loss, -log_probs * weights * advantages, rtol=1e-4
  )
  # No gradient flows through the weight.
  np.testing.assert_allclose(gradient, -weights * advantages, rtol=1e-4)
  is_capped = np.zeros_like(rhos, bool) if cap is None else rhos > cap
  assert cap is None or 0 < is_capped.sum() < is_capped.size
  np.testing.assert_array_equal(terms.is_capped, is_capped)
  for name in ('is_clipped_high', 'is_clipped_low', 'is_clipped_dual'):
    assert not np.any(getattr(terms, name)), name


def _ppo_oracle(low=0.2, high=0.28, dual=3.0, cap=5.0):
  """(loss, gradient, capped, clipped high, low, dual), an action at a time."""
  rows = []
  for log_prob, a, b, p in zip(*(np.float64(x) for x in _actions())):
    r, w = np.exp(log_prob - p), np.exp(p - b)
    capped = w > cap
    if capped:
      w = 0.0
    clipped = (
      a > 0 and r > 1 + high,
      a < 0 and r < 1 - low,
      a < 0 and r > dual,
    )
    if clipped[0]:
      loss = -(1 + high) * a
    elif clipped[1]:
      loss = -(1 - low) * a
    elif clipped[2]:
      loss = -dual * a
    else:
      loss = -r * a
    gradient = 0.0 if any(clipped) else -r * a
    rows.append((w * loss, w * gradient, capped, *clipped))
  return [np.array(column) for column in zip(*rows)]


def test_ppo_matches_a_loop_over_actions():
  expected = _ppo_oracle()
  terms, gradient = _terms('ppo')
  np.testing.assert_allclose(terms.loss, expected[0], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-6)
  for actual, wanted in zip(terms[1:], expected[2:]):
    assert 0 < wanted.sum() < wanted.size
    np.testing.assert_array_equal(actual, wanted)


def test_ppos_constants_are_those_given():
  constants = (0.5, 0.1, 1.5, 1.2)
  names = ('clip_low', 'clip_high', 'dual_clip', 'behaviour_cap')
  terms, gradient = _terms(
    'ppo', **{f'ppo_{n}': x for n, x in zip(names, constants)}
  )
  expected = _ppo_oracle(*constants)
  np.testing.assert_allclose(terms.loss, expected[0], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-6)


def test_the_first_update_of_ppo_is_importance_sampling():
  """The proximal policy is the policy itself: nothing is clipped."""
  log_probs, advantages, behaviour, _ = (np.float64(x) for x in _actions())
  weights = np.exp(log_probs - behaviour)
  terms, gradient = _terms('ppo', with_proximal=False)
  weights = np.where(weights > 5.0, 0.0, weights)
  np.testing.assert_allclose(gradient, -weights * advantages, rtol=1e-4)
  assert not np.any(terms.is_clipped_high | terms.is_clipped_low)


@pytest.mark.parametrize('kind', policy_loss.KINDS)
def test_ratios_beyond_float32_stay_finite(kind):
  wide = jnp.array([-500.0, 500.0, 0.0, 1e9], jnp.float32)
  terms = policy_loss.policy_terms(
    -jnp.ones(4, jnp.float32),
    jnp.array([1.0, -1.0, 1.0, -1.0], jnp.float32),
    wide,
    -jnp.ones(4, jnp.float32) + wide,
    config=policy_loss.PolicyLoss(kind=kind),
    rho_bar=1.0,
  )
  assert np.isfinite(np.asarray(terms.loss)).all()


def test_the_config_offers_every_loss_and_ratio():
  assert transformer_config.LOSSES == policy_loss.KINDS
  assert transformer_config.IMPORTANCE_RATIOS == token_loss.RATIOS
  with pytest.raises(
    ValueError, match=r"kind \('grpo'\) must be one of vtrace"
  ):
    policy_loss.PolicyLoss(kind='grpo')
