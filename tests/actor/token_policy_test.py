"""What is recorded while sampling is what the learner computes later."""

import jax
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.actor import token_policy
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.sharding import mesh as mesh_lib

_CONFIG = config_lib.TransformerConfig(
  vocabulary_size=16,
  num_layers=2,
  model_size=16,
  mlp_size=24,
  num_heads=4,
  num_kv_heads=2,
  head_size=4,
  # Far from uniform, so that a log-probability says something.
  init_scale=0.5,
)
_MAX_LENGTH = 8


def _variables(version=1):
  params = params_lib.init(_CONFIG, jax.random.PRNGKey(version))
  return types.Variables(version, jax.tree_util.tree_map(np.array, params))


def _policy(num=3, *, seed=0, version=1, **kwargs):
  policy = token_policy.TokenPolicy(
    _CONFIG,
    num_environments=num,
    max_length=_MAX_LENGTH,
    dtype='float32',
    seed=seed,
    **kwargs,
  )
  policy.set_variables(_variables(version))
  return policy


def _act(policy, ids, tokens, is_first):
  ids = np.array(ids, np.int32)
  return policy.act(
    ids,
    {'token': np.array(tokens, np.uint8)},
    np.full(ids.size, is_first, np.bool_),
  )


def _generate(policy, ids, prompt, length):
  """Each of `ids` reads the prompt, then what it says itself.

  Returns:
    (tokens i32 [K, length], log-probabilities f32 [K, length - 1]); those of
    the prompt's tokens are NaN.
  """
  rows, log_probs = [np.full(len(ids), prompt[0])], []
  for t in range(1, length):
    output = _act(policy, ids, rows[-1], t == 1)
    if t < len(prompt):
      rows.append(np.full(len(ids), prompt[t]))
      log_probs.append(np.full(len(ids), np.nan))
    else:
      rows.append(output.action)
      log_probs.append(output.log_prob)
  return np.stack(rows, axis=1), np.stack(log_probs, axis=1)


def _learner_log_probs(variables, tokens):
  """Of the sharded transformer, all sequences packed into one row; [K, T]."""
  mesh = mesh_lib.make_mesh(jax.devices()[:4], data=1, sequence=2, tensor=2)
  model = model_lib.make_transformer(
    _CONFIG, mesh, config_lib.ComputeConfig(dtype='float32')
  )
  num, length = tokens.shape
  row = lambda x: np.asarray(x, np.int32).reshape(1, -1)
  apply = mesh_lib.shard_map(
    model.apply,
    mesh=mesh,
    in_specs=(model.param_specs, *[mesh_lib.token_spec()] * 4),
    out_specs=mesh_lib.position_spec(),
  )
  outputs = jax.jit(apply)(
    variables.params,
    row(tokens),
    row(np.roll(tokens, -1, axis=1)),
    row(np.repeat(np.arange(1, num + 1), length)),
    row(np.tile(np.arange(length), num)),
  )
  return np.asarray(outputs.log_prob).reshape(num, length)[:, :-1]


def test_recorded_log_probs_equal_the_learners():
  policy, ids = _policy(num=4), [0, 1, 2, 3]
  prompt = [2, 5, 1]
  for _ in range(2):  # The second episode begins on top of the first.
    tokens, log_probs = _generate(policy, ids, prompt, _MAX_LENGTH)
    expected = _learner_log_probs(_variables(), tokens)
    said = ~np.isnan(log_probs)
    assert said.sum() == 4 * (_MAX_LENGTH - len(prompt))
    np.testing.assert_allclose(log_probs[said], expected[said], atol=1e-5)
    assert len({tuple(row) for row in tokens}) > 1


def test_what_one_is_answered_does_not_depend_on_the_others():
  together, log_probs = _generate(_policy(), [0, 1, 2], [2, 5, 1], 8)
  policy = _policy()
  # Environment 1 comes later, and in between the others.
  rows, own = [2, 5, 1], []
  for t in range(1, 8):
    _act(policy, [0, 2], [2, 2] if t == 1 else [7, 7], t == 1)
    output = _act(policy, [1], [rows[t - 1]], t == 1)
    if t >= 3:
      rows.append(int(output.action[0]))
      own.append(float(output.log_prob[0]))
  assert rows == together[1].tolist()
  np.testing.assert_allclose(own, log_probs[1, 2:], atol=1e-6)


def test_seeds_differ_and_greedy_takes_the_likeliest():
  generate = lambda **kwargs: _generate(_policy(**kwargs), [0, 1, 2], [2, 1], 8)
  tokens = generate()[0]
  assert not np.array_equal(tokens, generate(seed=1)[0])
  np.testing.assert_array_equal(tokens, generate()[0])
  greedy, log_probs = generate(greedy=True)
  assert (greedy == greedy[:1]).all()
  assert log_probs[0, 1:].sum() > generate()[1][:, 1:].sum(axis=1).min()


def test_new_variables_count_from_the_next_token_on():
  policy = _policy(num=1, greedy=True)
  _act(policy, [0], [3], True)
  policy.set_variables(_variables(2))
  assert policy.policy_version == 2
  _act(policy, [0], [4], True)
  fresh = _policy(num=1, version=2, greedy=True)
  _act(fresh, [0], [4], True)
  ours, theirs = (_act(p, [0], [5], False) for p in (policy, fresh))
  assert ours.action == theirs.action
  np.testing.assert_allclose(ours.log_prob, theirs.log_prob, atol=1e-6)


def test_an_episode_longer_than_the_cache_is_refused():
  policy = _policy(num=1)
  for t in range(_MAX_LENGTH):
    _act(policy, [0], [3], t == 0)
  with pytest.raises(errors.UserError, match=r'trajectory_length \(7\)'):
    _act(policy, [0], [3], False)
  _act(policy, [0], [3], True)


def test_one_program_serves_every_call():
  policy = _policy()
  _act(policy, [0, 1, 2], [2, 3, 4], True)
  compiled = policy._act._cache_size()
  _act(policy, [1], [3], False)
  policy.set_variables(_variables(2))
  _act(policy, [0, 2], [3, 5], True)
  assert policy._act._cache_size() == compiled == 1
