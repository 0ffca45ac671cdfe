"""Reading through a cache says what the whole sequence at once says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tunix_reverb.networks.transformer import decoding

_LENGTH = 10


def _read_fn(config, **kwargs):
  return jax.jit(functools.partial(decoding.read, config, **kwargs))


def _reading(slots, tokens, starts, counts=None):
  """A call's `Reading`; all tokens count unless told otherwise."""
  tokens = np.asarray(tokens, np.int32)
  if counts is None:
    counts = np.full(len(slots), tokens.shape[1])
  return decoding.Reading(
    np.asarray(slots, np.int32),
    tokens,
    np.asarray(starts, np.int32),
    np.asarray(counts, np.int32),
  )


def _oracle_log_probs(config, params, tokens):
  """f32 [N, L], of each token's successor; the last one's is of token 0."""
  num, length = tokens.shape
  log_prob, _, _ = oracle.outputs(
    config,
    params,
    tokens,
    np.concatenate([tokens[:, 1:], np.zeros((num, 1), np.int32)], axis=1),
    np.ones_like(tokens),
    np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape),
  )
  return np.asarray(log_prob)


@pytest.mark.parametrize('tied', [False, True])
def test_a_token_at_a_time_equals_the_oracle(tied):
  config = dataclasses.replace(oracle.ALL_OPTIONS, tied_embeddings=tied)
  params = oracle.random_params(config)
  rng = np.random.default_rng(1)
  tokens = rng.integers(0, config.vocabulary_size, (3, _LENGTH), np.int32)
  expected = _oracle_log_probs(config, params, tokens)
  read = _read_fn(config)
  cache = decoding.empty_cache(
    config, num_slots=3, length=_LENGTH, dtype='float32'
  )
  for t in range(_LENGTH - 1):
    log_probs, cache = read(
      params, cache, _reading([0, 1, 2], tokens[:, t : t + 1], [t] * 3)
    )
    chosen = np.asarray(log_probs)[np.arange(3), tokens[:, t + 1]]
    np.testing.assert_allclose(chosen, expected[:, t], rtol=1e-5, atol=1e-5)


def test_chunks_of_some_slots_equal_the_oracle():
  """Parts of 1 to 4 tokens, in any slots, on top of what others left."""
  config = oracle.ALL_OPTIONS
  params = oracle.random_params(config)
  rng = np.random.default_rng(2)
  tokens = rng.integers(0, config.vocabulary_size, (6, _LENGTH), np.int32)
  expected = _oracle_log_probs(config, params, tokens)
  read = _read_fn(config)
  cache = decoding.empty_cache(
    config, num_slots=3, length=_LENGTH, dtype='float32'
  )
  sequences = [0, 1, 2]  # In each slot, and then 3, 4, 5.
  starts = np.zeros(3, np.int32)
  checked = 0
  while min(sequences) < 6:
    slots = rng.permutation(3)[:2]
    slots = slots[[sequences[s] < 6 for s in slots]]
    counts = np.minimum(
      rng.integers(1, 5, slots.size), _LENGTH - 1 - starts[slots]
    )
    # Two rows in every call; what no slot is named for goes nowhere.
    chunk = np.full((2, 4), 7, np.int32)
    of_call = np.full((3, 2), 1)
    of_call[0] = 3
    for row, (slot, count) in enumerate(zip(slots, counts)):
      begin = starts[slot]
      chunk[row, :count] = tokens[sequences[slot], begin : begin + count]
      of_call[:, row] = slot, begin, count
    log_probs, cache = read(
      params, cache, _reading(of_call[0], chunk, of_call[1], of_call[2])
    )
    for row, (slot, count) in enumerate(zip(slots, counts)):
      starts[slot] += count
      sequence, end = sequences[slot], starts[slot]
      assert log_probs[row, tokens[sequence, end]] == pytest.approx(
        expected[sequence, end - 1], abs=1e-5
      )
      checked += 1
      if end == _LENGTH - 1:
        sequences[slot], starts[slot] = sequence + 3, 0
  assert checked > 20


def test_temperature_divides_the_logits():
  config = oracle.TINY
  params = oracle.random_params(config)
  cache = decoding.empty_cache(config, num_slots=1, length=4, dtype='float32')
  reading = _reading([0], [[3]], [0])
  plain, _ = _read_fn(config)(params, cache, reading)
  cool, _ = _read_fn(config, temperature=0.5)(params, cache, reading)
  np.testing.assert_allclose(
    cool, jax.nn.log_softmax(2.0 * plain), rtol=1e-5, atol=1e-5
  )


def test_bfloat16_is_close_and_its_log_probs_are_float32():
  config = oracle.TINY
  params = oracle.random_params(config)
  outputs = {}
  for dtype in ('float32', 'bfloat16'):
    cache = decoding.empty_cache(config, num_slots=1, length=4, dtype=dtype)
    prepared = decoding.prepare(
      jax.tree_util.tree_map(jnp.array, params), dtype
    )
    shapes = decoding.prepared_shapes(config, dtype)
    assert jax.tree_util.tree_map(lambda x: x.dtype, prepared) == (
      jax.tree_util.tree_map(lambda x: x.dtype, shapes)
    )
    log_probs, cache = _read_fn(config)(
      prepared, cache, _reading([0], [[3]], [0])
    )
    assert log_probs.dtype == jnp.float32
    assert cache.keys.dtype == dtype
    outputs[dtype] = np.asarray(log_probs)
    assert np.exp(outputs[dtype]).sum() == pytest.approx(1.0, abs=1e-5)
  difference = np.abs(outputs['float32'] - outputs['bfloat16']).max()
  assert 0 < difference < 0.3
