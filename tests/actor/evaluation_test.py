"""Evaluation plays the same number of whole episodes in every environment."""

import threading

import dm_env
from dm_env import specs as dm_specs
import jax
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import evaluation
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.environments import asynchronous
from tunix_reverb.environments import canonical
from tunix_reverb.environments import factory
from tunix_reverb.environments import vector
from tunix_reverb.networks import policy_network
from tunix_reverb.telemetry import metrics


class _Fixed(dm_env.Environment):
  """Episodes of `length` transitions that all pay 1."""

  def __init__(self, length, gate=None):
    self._length, self._count, self._gate = length, length, gate

  def reset(self):
    self._count = 0
    return dm_env.restart(np.zeros(2, np.float32))

  def step(self, action):
    if self._gate is not None:
      self._gate.wait(20.0)
    if self._count == self._length:
      return self.reset()
    self._count += 1
    observation = np.full(2, self._count, np.float32)
    if self._count == self._length:
      return dm_env.termination(1.0, observation)
    return dm_env.transition(1.0, observation)

  def observation_spec(self):
    return dm_specs.Array((2,), np.float32)

  def action_spec(self):
    return dm_specs.DiscreteArray(2)


def _policy(spec, num):
  network = policy_network.make_policy_network(spec, hidden_sizes=(4,))
  policy = policy_lib.BatchedPolicy(
    network, num_environments=num, seed=0, greedy=True
  )
  params = jax.device_get(network.init(jax.random.PRNGKey(0)))
  policy.set_variables(types.Variables(6, params))
  return policy


def _spec(environment):
  return specs.make_environment_spec(canonical.canonicalise(environment))


@pytest.fixture
def make():
  """Vector environments whose episodes have the given lengths."""
  made = []

  def _make(lengths, kind=vector.SynchronousVectorEnvironment, **kwargs):
    # The argument binds the length.
    factories = [lambda n=n: _Fixed(n) for n in lengths]
    made.append(kind(factories, **kwargs))
    return made[-1], _policy(_spec(_Fixed(1)), len(lengths))

  yield _make
  for environment in made:
    environment.close()


@pytest.mark.parametrize('mode', ['synchronous', 'asynchronous'])
def test_short_episodes_are_not_favoured(make, mode):
  lengths = [1, 2, 3, 12]
  if mode == 'synchronous':
    environment, policy = make(lengths)
  else:
    environment, policy = make(
      lengths, asynchronous.AsynchronousVectorEnvironment, timeout_s=20.0
    )
  result = evaluation.evaluate(environment, policy, num_episodes=8)
  assert sorted(result.lengths) == sorted(2 * lengths)
  np.testing.assert_array_equal(result.returns, result.lengths)
  assert result.policy_version == 6


def test_episodes_under_way_at_the_beginning_do_not_count(make):
  environment, policy = make([5, 7])
  for _ in range(4):  # Every call but the first begins in mid-episode.
    result = evaluation.evaluate(environment, policy, num_episodes=2)
    assert sorted(result.lengths) == [5, 7]
    assert sorted(result.returns) == [5.0, 7.0]


def test_giving_up_gives_none_also_while_nothing_answers(make):
  environment, policy = make([3])
  asked = iter([True, True, False])
  stop = lambda: next(asked)
  assert (
    evaluation.evaluate(environment, policy, num_episodes=9, keep_going=stop)
    is None
  )
  gate = threading.Event()
  blocked = asynchronous.AsynchronousVectorEnvironment(
    [lambda: _Fixed(3, gate)], timeout_s=30.0
  )
  asked = iter([True, True, False])
  try:
    assert (
      evaluation.evaluate(blocked, policy, num_episodes=9, keep_going=stop)
      is None
    )
  finally:
    gate.set()
    blocked.close()


def test_progress_is_told_after_every_step(make):
  environment, policy = make([4])
  calls = []
  evaluation.evaluate(
    environment, policy, num_episodes=1, on_progress=lambda: calls.append(1)
  )
  assert len(calls) == 5  # FIRST and four transitions.


def test_episodes_must_divide_among_the_environments(make):
  environment, policy = make([1, 1])
  with pytest.raises(ValueError, match=r'num_episodes \(3\)'):
    evaluation.evaluate(environment, policy, num_episodes=3)


@pytest.mark.parametrize(
  ('episodes', 'expected'), [(100, 25), (32, 32), (7, 7), (1, 1), (37, 1)]
)
def test_environments_for_divides_the_episodes(episodes, expected):
  assert evaluation.environments_for(episodes) == expected


def test_catch_with_a_real_policy_and_known_metric_names():
  environment = factory.make_vector(
    'catch', num_environments=4, mode='vectorised', seed=0, timeout_s=10.0
  )
  try:
    policy = _policy(factory.environment_spec('catch', seed=0), 4)
    result = evaluation.evaluate(environment, policy, num_episodes=20)
  finally:
    environment.close()
  assert result.lengths.tolist() == 20 * [9]
  assert set(result.returns) <= {-1.0, 1.0}
  values = result.metrics()
  metrics.check_names(values)
  assert values['evaluation_episodes'] == 20
  assert values['evaluation_return_mean'] == result.returns.mean()
  assert values['evaluation_return_min'] == result.returns.min()
