"""The batched policy: static shapes, padding, recurrent state, sampling."""

from dm_env import specs as dm_specs
import jax
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.networks import policy_network
from tunix_reverb.telemetry import compiles

_SPEC = specs.EnvironmentSpec(
  observation=dm_specs.Array((3,), np.float32),
  action=dm_specs.DiscreteArray(4),
  reward=dm_specs.Array((), np.float32),
  discount=dm_specs.BoundedArray((), np.float32, 0, 1),
)


def _make(*, core='none', num=4, **kwargs):
  network = policy_network.make_policy_network(
    _SPEC, hidden_sizes=(8,), core=core, core_size=5
  )
  policy = policy_lib.BatchedPolicy(
    network, num_environments=num, seed=0, **kwargs
  )
  params = jax.device_get(network.init(jax.random.PRNGKey(1)))
  # Away from the nearly uniform start, so that actions differ.
  params = jax.tree_util.tree_map(lambda p: p * np.float32(5.0), params)
  policy.set_variables(types.Variables(3, params))
  return network, policy, params


def _observations(count, seed=0):
  generator = np.random.default_rng(seed)
  return generator.normal(size=(count, 3)).astype(np.float32)


@pytest.mark.parametrize('core', ['none', 'lstm', 'gru'])
def test_log_prob_is_the_networks_own(core):
  network, policy, params = _make(core=core)
  ids, first = np.arange(4, dtype=np.int32), np.ones(4, np.bool_)
  observation = _observations(4)
  output = policy.act(ids, observation, first)
  outputs, _, _ = network.step(
    params, observation, network.initial_state(4), first
  )
  expected = network.distribution.log_prob(outputs, output.action)
  np.testing.assert_allclose(output.log_prob, expected, rtol=1e-5)
  assert policy.policy_version == 3


@pytest.mark.parametrize('core', ['none', 'lstm'])
def test_some_environments_answer_as_they_would_among_all(core):
  _, some, _ = _make(core=core, greedy=True)
  _, every, _ = _make(core=core, greedy=True)
  observation = _observations(4)
  first = np.ones(4, np.bool_)
  for _ in range(3):
    ids = np.array([2, 0], np.int32)
    part = some.act(ids, observation[ids], first[ids])
    whole = every.act(np.arange(4, dtype=np.int32), observation, first)
    np.testing.assert_array_equal(part.action, whole.action[ids])
    np.testing.assert_allclose(part.log_prob, whole.log_prob[ids], rtol=1e-5)
    first = np.zeros(4, np.bool_)
    observation = observation + np.float32(0.5)


def test_every_call_is_one_compiled_program():
  _, policy, _ = _make(core='lstm')
  policy.act(
    np.arange(4, dtype=np.int32), _observations(4), np.ones(4, np.bool_)
  )
  counter = compiles.CompileCounter()
  counter.mark_warm()
  for count in (1, 2, 3, 4):
    policy.act(
      np.arange(count, dtype=np.int32),
      _observations(count),
      np.zeros(count, np.bool_),
    )
  assert counter.recompiles == 0


def test_the_recurrent_state_is_kept_per_environment_and_reset_at_first():
  _, policy, _ = _make(core='gru')
  ids = np.arange(4, dtype=np.int32)
  never = np.zeros(4, np.bool_)
  output = policy.act(ids, _observations(4), np.ones(4, np.bool_))
  before = policy.core_state_before(ids, never)
  jax.tree_util.tree_map(
    np.testing.assert_array_equal, before, output.core_state
  )
  assert any(np.any(leaf) for leaf in jax.tree_util.tree_leaves(before))
  first = np.array([False, True, False, False])
  reset = policy.core_state_before(ids, first)
  for leaf, kept in zip(
    jax.tree_util.tree_leaves(reset), jax.tree_util.tree_leaves(before)
  ):
    assert not leaf[1].any()
    np.testing.assert_array_equal(leaf[0], kept[0])


def test_sampling_follows_the_distribution_and_differs_between_calls():
  network, policy, params = _make(num=512)
  observation = np.tile(_observations(1), (512, 1))
  ids, first = np.arange(512, dtype=np.int32), np.zeros(512, np.bool_)
  actions = [policy.act(ids, observation, first).action for _ in range(8)]
  assert not np.array_equal(actions[0], actions[1])
  outputs, _, _ = network.step(params, observation[:1], (), first[:1])
  expected = np.asarray(jax.nn.softmax(outputs)[0])
  frequencies = np.bincount(np.concatenate(actions), minlength=4) / (512 * 8)
  np.testing.assert_allclose(frequencies, expected, atol=0.03)


def test_greedy_takes_the_mode():
  network, policy, params = _make(greedy=True)
  observation = _observations(4)
  first = np.zeros(4, np.bool_)
  output = policy.act(np.arange(4, dtype=np.int32), observation, first)
  outputs, _, _ = network.step(params, observation, (), first)
  np.testing.assert_array_equal(
    output.action, np.argmax(np.asarray(outputs), axis=-1)
  )


@pytest.mark.parametrize('core', ['none', 'lstm'])
def test_independent_environments_do_not_depend_on_who_else_is_asked(core):
  _, some, _ = _make(core=core, independent=True)
  _, every, _ = _make(core=core, independent=True)
  everyone, first = np.arange(4, dtype=np.int32), np.ones(4, np.bool_)
  alone = {i: [] for i in range(4)}
  # Environment 3 is asked thrice before 1 is asked at all.
  for ids in ([3], [3, 0], [2, 3], [1, 0], [1, 2], [0, 1, 2]):
    ids = np.array(ids, np.int32)
    steps = [len(alone[i]) for i in ids]
    observation = np.stack(
      [_observations(4, seed=s)[i] for i, s in zip(ids, steps)]
    )
    output = some.act(ids, observation, np.array(steps) == 0)
    for row, i in enumerate(ids):
      alone[i].append((output.action[row], output.log_prob[row]))
  for step in range(3):
    output = every.act(everyone, _observations(4, seed=step), first)
    first = np.zeros(4, np.bool_)
    for i in range(4):
      # To the last bit: a synchronous run is reproduced so.
      assert (output.action[i], output.log_prob[i]) == alone[i][step]


def test_independent_environments_differ_and_do_not_repeat_themselves():
  _, policy, _ = _make(num=64, independent=True)
  ids, first = np.arange(64, dtype=np.int32), np.ones(64, np.bool_)
  observation = np.zeros((64, 3), np.float32)
  calls = [policy.act(ids, observation, first).action for _ in range(2)]
  assert len(set(calls[0].tolist())) > 1
  assert (calls[0] != calls[1]).any()


def test_independent_environments_compile_once():
  counter = compiles.CompileCounter()
  _, policy, _ = _make(independent=True)
  ids, first = np.arange(4, dtype=np.int32), np.ones(4, np.bool_)
  policy.act(ids, _observations(4), first)
  counter.mark_warm()
  for count in (1, 2, 4):
    policy.act(ids[:count], _observations(count), first[:count])
  assert counter.recompiles == 0
