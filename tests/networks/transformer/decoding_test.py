"""A token at a time says what the whole sequence at once says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from tunix_reverb.networks.transformer import decoding

_LENGTH = 10


def _decode_fn(config):
  return jax.jit(functools.partial(decoding.decode, config))


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
  decode = _decode_fn(config)
  cache = decoding.empty_cache(
    config, num_slots=3, length=_LENGTH, dtype='float32'
  )
  for t in range(_LENGTH - 1):
    log_probs, cache = decode(
      params, cache, tokens[:, t], np.full(3, t, np.int32)
    )
    chosen = np.asarray(log_probs)[np.arange(3), tokens[:, t + 1]]
    np.testing.assert_allclose(chosen, expected[:, t], rtol=1e-5, atol=1e-5)


def test_slots_are_at_places_of_their_own_and_begin_anew():
  config = oracle.ALL_OPTIONS
  params = oracle.random_params(config)
  rng = np.random.default_rng(2)
  # Slot 0 runs whole; slot 1 starts again after 4, on top of what it left.
  first = rng.integers(0, config.vocabulary_size, (2, _LENGTH), np.int32)
  second = rng.integers(0, config.vocabulary_size, (1, _LENGTH), np.int32)[0]
  decode = _decode_fn(config)
  cache = decoding.empty_cache(
    config, num_slots=2, length=_LENGTH, dtype='float32'
  )
  got = []
  for t in range(_LENGTH - 1):
    again = t >= 4
    tokens = np.array([first[0, t], second[t - 4] if again else first[1, t]])
    places = np.array([t, t - 4 if again else t], np.int32)
    log_probs, cache = decode(params, cache, tokens, places)
    got.append(np.asarray(log_probs))
  expected = _oracle_log_probs(config, params, np.stack([first[0], second]))
  for t in range(4, _LENGTH - 1):
    assert got[t][0, first[0, t + 1]] == pytest.approx(expected[0, t], abs=1e-5)
    assert got[t][1, second[t - 3]] == pytest.approx(
      expected[1, t - 4], abs=1e-5
    )


def test_bfloat16_is_close_and_its_log_probs_are_float32():
  config = oracle.TINY
  params = oracle.random_params(config)
  tokens, places = np.array([3], np.int32), np.zeros(1, np.int32)
  outputs = {}
  for dtype in ('float32', 'bfloat16'):
    cache = decoding.empty_cache(config, num_slots=1, length=4, dtype=dtype)
    log_probs, cache = _decode_fn(config)(params, cache, tokens, places)
    assert log_probs.dtype == jnp.float32
    assert cache.keys.dtype == dtype
    outputs[dtype] = np.asarray(log_probs)
    assert np.exp(outputs[dtype]).sum() == pytest.approx(1.0, abs=1e-5)
  difference = np.abs(outputs['float32'] - outputs['bfloat16']).max()
  assert 0 < difference < 0.3
