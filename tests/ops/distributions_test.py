"""Distributions against distrax, and their samples against themselves."""

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb.ops import distributions

_LOGITS = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32)


def _distrax(fn):
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    return fn()


def test_categorical_matches_distrax():
  ours = distributions.Categorical(7)
  theirs = distrax.Categorical(logits=_LOGITS)
  actions = np.random.default_rng(1).integers(0, 7, size=(3, 5))
  for dtype in (np.uint8, np.int32):
    np.testing.assert_allclose(
      ours.log_prob(_LOGITS, actions.astype(dtype)),
      _distrax(lambda: theirs.log_prob(actions)),
      rtol=1e-5,
    )
  np.testing.assert_allclose(
    ours.entropy(_LOGITS), _distrax(theirs.entropy), rtol=1e-5
  )
  np.testing.assert_array_equal(ours.mode(_LOGITS), _distrax(theirs.mode))


def test_categorical_counts_from_its_minimum():
  ours = distributions.Categorical(7, minimum=-2)
  zero_based = distributions.Categorical(7)
  key = jax.random.PRNGKey(0)
  np.testing.assert_array_equal(
    ours.sample(_LOGITS, key=key) + 2, zero_based.sample(_LOGITS, key=key)
  )
  np.testing.assert_array_equal(
    ours.mode(_LOGITS) + 2, zero_based.mode(_LOGITS)
  )
  actions = np.full((3, 5), -1, np.int8)
  np.testing.assert_array_equal(
    ours.log_prob(_LOGITS, actions),
    zero_based.log_prob(_LOGITS, np.ones((3, 5), np.int8)),
  )


def test_action_out_of_range_is_harmless():
  ours = distributions.Categorical(7, minimum=1)
  zeros = np.zeros((3, 5), np.uint8)
  gradient = jax.grad(lambda x: jnp.sum(ours.log_prob(x, zeros)))(_LOGITS)
  np.testing.assert_array_equal(ours.log_prob(_LOGITS, zeros), 0)
  np.testing.assert_array_equal(gradient, 0)


def test_multi_categorical_is_the_product_of_its_parts():
  ours = distributions.MultiCategorical((2, 3, 2), (0, 5, -1))
  parts = [
    (distrax.Categorical(logits=x), low)
    for x, low in zip(np.split(_LOGITS, [2, 5], axis=-1), (0, 5, -1))
  ]
  actions = np.asarray(ours.sample(_LOGITS, key=jax.random.PRNGKey(0)))
  assert actions.shape == (3, 5, 3)
  np.testing.assert_allclose(
    ours.log_prob(_LOGITS, actions),
    _distrax(
      lambda: sum(
        p.log_prob(actions[..., k] - low) for k, (p, low) in enumerate(parts)
      )
    ),
    rtol=1e-5,
  )
  np.testing.assert_allclose(
    ours.entropy(_LOGITS),
    _distrax(lambda: sum(p.entropy() for p, _ in parts)),
    rtol=1e-5,
  )
  np.testing.assert_array_equal(
    ours.mode(_LOGITS),
    _distrax(lambda: np.stack([p.mode() + low for p, low in parts], -1)),
  )


def test_multi_categorical_parts_are_sampled_independently():
  ours = distributions.MultiCategorical((2, 2), (0, 0))
  actions = np.asarray(
    ours.sample(np.zeros((4000, 4), np.float32), key=jax.random.PRNGKey(0))
  )
  agree = np.mean(actions[:, 0] == actions[:, 1])
  assert 0.45 < agree < 0.55


def test_gaussian_matches_distrax():
  rng = np.random.default_rng(0)
  shape = (3, 5, 2)
  mean, log_std, action = (
    rng.normal(size=shape).astype(np.float32) for _ in range(3)
  )
  params = distributions.GaussianParams(mean, log_std)
  ours = distributions.DiagonalGaussian((2,))
  theirs = _distrax(
    lambda: distrax.MultivariateNormalDiag(mean, np.exp(log_std))
  )
  np.testing.assert_allclose(
    ours.log_prob(params, action),
    _distrax(lambda: theirs.log_prob(action)),
    rtol=1e-4,
  )
  np.testing.assert_allclose(
    ours.entropy(params), _distrax(theirs.entropy), rtol=1e-5
  )
  np.testing.assert_array_equal(ours.mode(params), mean)


@pytest.mark.parametrize('shape', [(), (4,), (2, 3)])
def test_gaussian_of_any_action_shape(shape):
  ours = distributions.DiagonalGaussian(shape)
  params = distributions.GaussianParams(
    np.zeros((6, *shape), np.float32), np.zeros((6, *shape), np.float32)
  )
  action = ours.sample(params, key=jax.random.PRNGKey(0))
  assert action.shape == (6, *shape)
  assert ours.log_prob(params, action).shape == (6,)
  assert ours.entropy(params).shape == (6,)


def test_samples_follow_the_distribution():
  key = jax.random.PRNGKey(0)
  logits = np.log(np.array([0.2, 0.7, 0.1], np.float32))
  samples = distributions.Categorical(3).sample(
    np.tile(logits, (20000, 1)), key=key
  )
  np.testing.assert_allclose(
    np.bincount(samples) / 20000, [0.2, 0.7, 0.1], atol=0.02
  )
  params = distributions.GaussianParams(
    np.full((20000, 1), 3.0, np.float32),
    np.full((20000, 1), np.log(0.5), np.float32),
  )
  samples = distributions.DiagonalGaussian((1,)).sample(params, key=key)
  np.testing.assert_allclose(
    [samples.mean(), samples.std()], [3.0, 0.5], atol=0.02
  )


def test_results_are_float32_for_bfloat16_params():
  logits = jnp.asarray(_LOGITS, jnp.bfloat16)
  ours = distributions.Categorical(7)
  assert ours.entropy(logits).dtype == jnp.float32
  assert ours.log_prob(logits, np.zeros((3, 5), int)).dtype == jnp.float32
