"""Log-probs over a split vocabulary against a whole log-softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb.ops import token_log_probs
from tunix_reverb.sharding import mesh as mesh_lib

pytestmark = pytest.mark.slow

_VOCABULARY, _FEATURES = 24, 6
_P = mesh_lib.PartitionSpec


def _mesh(tensor):
  return mesh_lib.make_mesh(jax.devices()[:tensor], data=1, tensor=tensor)


def _inputs(num_tokens):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  targets = rng.integers(0, _VOCABULARY, num_tokens).astype(np.int32)
  return normal(num_tokens, _FEATURES), normal(_VOCABULARY, _FEATURES), targets


def _split(mesh, block):
  """Global features [T, D], head [V, D], targets [T] -> log_prob, entropy."""
  tokens = _P(mesh_lib.TENSOR)

  # Per device: features [T / t, D], head [V / t, D], targets [T / t].
  def fn(features, head, targets):
    return token_log_probs.token_log_probs(
      features, head, targets, axis=mesh_lib.TENSOR, block=block
    )

  return mesh_lib.shard_map(
    fn, mesh=mesh, in_specs=(tokens, tokens, tokens), out_specs=tokens
  )


def _whole(features, head, targets):
  log_probs = jax.nn.log_softmax(features @ head.T)
  chosen = jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0]
  return chosen, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)


@pytest.mark.parametrize(
  'tensor,block', [(1, 100), (1, 5), (4, 100), (4, 2), (8, 1)]
)
def test_values_and_gradients_equal_the_whole_softmax(tensor, block):
  """Blocks that do not divide a device's tokens included."""
  inputs = _inputs(24)
  weights = np.cos(np.arange(24)).astype(np.float32)

  def total(fn):
    def weighted(features, head):
      log_prob, entropy = fn(features, head, inputs[2])
      return jnp.sum(weights * (log_prob + 0.3 * entropy)), (log_prob, entropy)

    return jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))

  expected = total(_whole)(*inputs[:2])
  actual = total(_split(_mesh(tensor), block))(*inputs[:2])
  jax.tree_util.tree_map(
    lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5),
    actual,
    expected,
  )


def test_extreme_logits_stay_finite():
  features, head, targets = _inputs(8)
  outputs = jax.jit(_split(_mesh(4), 2))(1e4 * features, head, targets)
  expected = _whole(1e4 * features, head, targets)
  for a, e in zip(outputs, expected):
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-3)


def test_targets_out_of_range_have_log_prob_0():
  features, head, targets = _inputs(8)
  targets[[0, 5]] = -1, _VOCABULARY
  log_prob, entropy = jax.jit(_split(_mesh(4), 2))(features, head, targets)
  np.testing.assert_array_equal(np.flatnonzero(log_prob == 0), [0, 5])
  assert np.isfinite(entropy).all()


def test_no_device_ever_holds_all_logits():
  """Memory of the gradient step, per device, follows the block."""
  num_tokens, vocabulary, tensor = 1024, 4096, 4
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  targets = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)

  def total(features, head, targets):
    outputs = _split(_mesh(tensor), 16)(features, head, targets)
    return jnp.sum(outputs.log_prob + outputs.entropy)

  compiled = (
    jax.jit(jax.grad(total, argnums=(0, 1)))
    .lower(array(num_tokens, 8), array(vocabulary, 8), targets)
    .compile()
  )
  used = compiled.memory_analysis().temp_size_in_bytes
  all_logits = 4 * num_tokens * vocabulary
  # One block of 4 x 16 tokens and a quarter of the vocabulary is 1/64 of all;
  # the CPU backend counts what a few of them take at once, on all devices.
  assert used < all_logits / 4
