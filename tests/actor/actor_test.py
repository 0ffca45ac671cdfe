"""The Acme-style actor: its contract, and what it records for recurrence."""

import jax
import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.actor import actor as actor_lib
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.actor import test_utils
from tunix_reverb.environments import factory
from tunix_reverb.networks import policy_network


class _Variables(core.VariableSource):
  """Holds one version; remembers how long it was asked to wait."""

  def __init__(self, network):
    self._params = jax.device_get(network.init(jax.random.PRNGKey(1)))
    self.version = 0
    self.waits_s = []

  def get_variables(self, min_version=0, timeout_s=0.0):
    self.waits_s.append(timeout_s)
    if not self.version or self.version < min_version:
      return None
    scale = np.float32(1 + self.version)
    return types.Variables(
      self.version, jax.tree_util.tree_map(lambda p: p * scale, self._params)
    )


def _network(core='none'):
  return policy_network.make_policy_network(
    factory.environment_spec('catch', seed=0),
    hidden_sizes=(8,),
    core=core,
    core_size=4,
  )


def _actor(network, variables, adder, **kwargs):
  policy = policy_lib.BatchedPolicy(network, num_environments=1, seed=0)
  return actor_lib.PolicyActor(policy, variables, adder=adder, **kwargs)


class TestPolicyActor(test_utils.ActorContract):
  core = 'none'

  def setup_method(self):
    self.network = _network(self.core)
    self.variables = _Variables(self.network)

  def make_environment(self):
    return factory.make('catch', seed=0)

  def publish(self, policy_version):
    self.variables.version = policy_version

  def make_actor(self, adder):
    return _actor(self.network, self.variables, adder)


class TestRecurrentPolicyActor(TestPolicyActor):
  core = 'gru'

  def test_the_recorded_core_state_is_what_the_policy_goes_on_from(self):
    self.publish(1)
    adder = test_utils.RecordingAdder()
    actor, environment = self.make_actor(adder), self.make_environment()
    for _ in range(2):
      timestep = environment.reset()
      actor.observe_first(timestep)
      while not timestep.last():
        action = actor.select_action(timestep.observation)
        timestep = environment.step(action)
        actor.observe(action, timestep)
    params = self.variables.get_variables().params
    core_state, observation, first = None, None, False
    for event in adder.events:
      if event[0] == 'first':
        core_state, first = self.network.initial_state(1), True
        observation = event[1].observation
        continue
      _, action, timestep, extras = event
      outputs, _, core_state = self.network.step(
        params, observation[None], core_state, np.array([first])
      )
      log_prob = self.network.distribution.log_prob(outputs, action[None])[0]
      np.testing.assert_allclose(extras['log_prob'], log_prob, rtol=1e-4)
      jax.tree_util.tree_map(
        lambda ours, theirs: np.testing.assert_allclose(
          ours, theirs[0], rtol=1e-4, atol=1e-6
        ),
        extras['core_state'],
        core_state,
      )
      observation, first = timestep.observation, False


def test_no_variables_by_the_deadline_is_an_error_that_says_so():
  network = _network()
  variables = _Variables(network)
  actor = _actor(network, variables, None, variable_timeout_s=0.25)
  timestep = factory.make('catch', seed=0).reset()
  actor.observe_first(timestep)
  with pytest.raises(errors.DeadlineExceededError, match=r'0\.25 s'):
    actor.select_action(timestep.observation)
  assert variables.waits_s == [0.25]
  variables.version = 1
  actor.select_action(timestep.observation)
  actor.update()
  assert variables.waits_s[-1] == 0.0, 'update() must not wait'
