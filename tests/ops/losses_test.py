"""The loss sums against NumPy and rlax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rlax

from tunix_reverb.ops import distributions
from tunix_reverb.ops import losses

_CONFIG = {
  'discount_factor': 0.9,
  'rho_bar': 1.0,
  'c_bar': 1.0,
  'vtrace_lambda': 0.8,
}


def _row(length=12, seed=0, **overrides):
  rng = np.random.default_rng(seed)
  normal = lambda: rng.normal(size=length).astype(np.float32)
  row = {
    'log_probs': -np.abs(normal()),
    'entropies': np.abs(normal()),
    'values': normal(),
    'rewards': normal(),
    'discounts': np.ones(length, np.float32),
    'behaviour_log_probs': -np.abs(normal()),
    'loss_mask': np.ones(length, bool),
    'segment_ids': np.ones(length, np.int32),
  }
  return row | overrides


def _sums(row, **overrides):
  positional = [row[k] for k in ('log_probs', 'entropies', 'values')]
  rest = {
    k: v
    for k, v in row.items()
    if k not in ('log_probs', 'entropies', 'values')
  }
  return losses.vtrace_actor_critic_loss(
    *positional, **rest, **(_CONFIG | overrides)
  )


@pytest.mark.filterwarnings('ignore:Rlax softmax:PendingDeprecationWarning')
def test_matches_rlax_on_one_segment():
  logits = np.random.default_rng(3).normal(size=(12, 4)).astype(np.float32)
  actions = np.random.default_rng(4).integers(0, 4, size=12)
  policy = distributions.Categorical(4)
  row = _row(
    log_probs=policy.log_prob(logits, actions), entropies=policy.entropy(logits)
  )
  sums = _sums(row)
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    rho = np.exp(row['log_probs'] - row['behaviour_log_probs'])[:-1]
    output = rlax.vtrace_td_error_and_advantage(
      row['values'][:-1],
      row['values'][1:],
      row['rewards'][:-1],
      0.9 * row['discounts'][:-1],
      rho,
      lambda_=0.8,
    )
    ones = np.ones(11, np.float32)
    pg_loss = 11 * rlax.policy_gradient_loss(
      logits[:-1], actions[:-1], output.pg_advantage, ones
    )
    entropy = -11 * rlax.entropy_loss(logits[:-1], ones)
  np.testing.assert_allclose(sums.pg_loss, pg_loss, rtol=1e-4)
  np.testing.assert_allclose(sums.entropy, entropy, rtol=1e-5)
  np.testing.assert_allclose(
    sums.baseline_loss, 0.5 * np.sum(np.square(output.errors)), rtol=1e-5
  )
  assert int(sums.num_transitions) == 11
  np.testing.assert_allclose(sums.rho, rho.sum(), rtol=1e-5)
  np.testing.assert_allclose(sums.rho_squared, (rho**2).sum(), rtol=1e-5)
  assert int(sums.rho_clipped) == np.sum(rho > 1)
  np.testing.assert_allclose(sums.value, row['values'][:-1].sum(), rtol=1e-5)


def test_statistics_of_ratios():
  mask = np.ones(12, bool)
  mask[4] = False
  row = _row(loss_mask=mask)
  sums = _sums(row, c_bar=0.7)
  counted = np.delete(np.arange(11), 4)
  rho = np.exp(row['log_probs'] - row['behaviour_log_probs'])[counted]
  np.testing.assert_allclose(sums.log_rho, np.log(rho).sum(), rtol=1e-5)
  np.testing.assert_allclose(sums.c, np.minimum(0.7, rho).sum(), rtol=1e-5)
  assert int(sums.c_clipped) == np.sum(rho > 0.7)


def test_a_batch_is_the_sum_of_its_rows():
  rows = [_row(seed=seed) for seed in range(3)]
  batch = {k: np.stack([r[k] for r in rows]) for k in rows[0]}
  parts = [_sums(r) for r in rows]
  for name, total in _sums(batch)._asdict().items():
    np.testing.assert_allclose(
      total, sum(float(getattr(p, name)) for p in parts), rtol=1e-5
    )


def test_gradients_flow_where_they_should():
  row = {k: jnp.asarray(v) for k, v in _row().items()}

  def gradient(field):
    wanted = {k: row[k] for k in ('log_probs', 'entropies', 'values')}
    return jax.grad(lambda w: getattr(_sums(row | w), field))(wanted)

  zero = lambda g: not np.any(g)
  pg = gradient('pg_loss')
  assert not zero(pg['log_probs']) and zero(pg['values'])
  baseline = gradient('baseline_loss')
  assert zero(baseline['log_probs']) and not zero(baseline['values'])
  k2 = gradient('k2')
  assert not zero(k2['log_probs']) and zero(k2['values'])
  for field in ('rho', 'rho_squared', 'log_rho', 'c', 'value'):
    assert all(zero(g) for g in gradient(field).values()), field


def test_masked_transition_is_the_identity_in_the_trace():
  """Masked or on-policy: the same targets, but out of the sums."""
  mask = np.ones(12, bool)
  mask[4:7] = False
  row = _row(loss_mask=mask)
  on_policy = dict(row)
  on_policy['behaviour_log_probs'] = np.where(
    mask, row['behaviour_log_probs'], row['log_probs']
  )
  np.testing.assert_allclose(_sums(row), _sums(on_policy), rtol=1e-6)
  assert int(_sums(row).num_transitions) == 8
  # The mask keeps the trace whole: a reward behind it still reaches the front.
  late = dict(row, rewards=row['rewards'] + 10 * (np.arange(12) == 8))
  late['rewards'] = late['rewards'].astype(np.float32)
  first = lambda r: jax.grad(lambda x: _sums(r | {'log_probs': x}).pg_loss)(
    jnp.asarray(r['log_probs'])
  )[0]
  assert abs(first(late) - first(row)) > 1e-3


def test_masked_garbage_changes_nothing():
  mask = np.ones(12, bool)
  mask[3] = False
  row = _row(loss_mask=mask)
  expected = _sums(row)
  row['log_probs'] = np.where(mask, row['log_probs'], np.nan)
  row['behaviour_log_probs'] = np.where(
    mask, row['behaviour_log_probs'], -np.inf
  ).astype(np.float32)
  np.testing.assert_array_equal(_sums(row), expected)


def test_padding_contributes_nothing():
  row = _row(segment_ids=np.zeros(12, np.int32))
  assert not np.any(_sums(row))


def test_rewards_are_clipped_then_scaled():
  rewards = np.linspace(-5, 5, 12).astype(np.float32)
  shape = losses.shape_rewards
  np.testing.assert_array_equal(
    shape(rewards, reward_clip=1.0, reward_scale=0.5),
    np.clip(rewards, -1, 1) * np.float32(0.5),
  )
  np.testing.assert_array_equal(
    shape(rewards, reward_clip=0.0, reward_scale=1.0), rewards
  )


def test_sums_stay_finite_at_extreme_ratios():
  row = _row(
    log_probs=np.full(12, -1.0, np.float32),
    behaviour_log_probs=np.full(12, -1e6, np.float32),
  )
  assert np.isfinite(np.asarray(_sums(row))).all()


def test_refuses_wrong_shapes():
  with pytest.raises(AssertionError):
    _sums(_row(values=np.zeros(11, np.float32)))
