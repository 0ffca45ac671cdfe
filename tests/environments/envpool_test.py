"""envpool behind the contract; what it gets wrong, put right."""

import unittest

import dm_env
import numpy as np
import pytest

pytest.importorskip('envpool', reason='envpool is not installed')

from tunix_reverb.environments import envpool_vector
from tunix_reverb.environments import factory
from tunix_reverb.environments import test_utils

FIRST, MID, LAST = (int(s) for s in dm_env.StepType)


class _EnvpoolTest(test_utils.VectorEnvironmentTestMixin):
  name = ''

  def make_object_under_test(self):
    return factory.make_vector(self.name, num_environments=3, seed=1)

  def make_spec(self):
    return factory.environment_spec(self.name)


class CartPoleTest(_EnvpoolTest, unittest.TestCase):
  name = 'envpool:CartPole-v1'


class PendulumTest(_EnvpoolTest, unittest.TestCase):
  name = 'envpool:Pendulum-v1'
  num_recvs = 210


class NestedTest(_EnvpoolTest, unittest.TestCase):
  name = 'envpool:CartpoleBalance-v1'
  num_recvs = 20
  reaches_last = False


def test_images_are_turned_to_channels_last():
  name = 'envpool:Pong-v5'
  spec = factory.environment_spec(name).observation
  assert (spec.shape, spec.dtype) == ((84, 84, 4), np.uint8)
  environment = factory.make_vector(name, num_environments=2, seed=0)
  _, timestep = environment.recv(1.0)
  assert timestep.observation.shape == (2, 84, 84, 4)
  # At FIRST the stack holds one frame twice at least: channels are stacked.
  image = timestep.observation[0]
  np.testing.assert_array_equal(image[..., 2], image[..., 3])
  environment.close()


def _last(environment, make_action, num_recvs):
  """The first batch with a LAST, and its number."""
  for i in range(num_recvs):
    ids, timestep = environment.recv(1.0)
    if (timestep.step_type == LAST).any():
      return i, timestep
    environment.send(make_action(timestep), ids)
  raise AssertionError('no episode ended')


def test_the_step_limit_is_a_truncation():
  environment = factory.make_vector(
    'envpool:Pendulum-v1', num_environments=2, seed=0
  )
  transitions, timestep = _last(
    environment, lambda t: np.zeros((2, 1), np.float32), 300
  )
  assert transitions == 200
  assert timestep.step_type.tolist() == [LAST, LAST]
  assert timestep.discount.tolist() == [1.0, 1.0]
  environment.close()


def test_cart_pole_at_its_limit_is_a_truncation():
  environment = factory.make_vector(
    'envpool:CartPole-v1', num_environments=1, seed=0
  )
  balance = lambda t: (
    t.observation @ [0.1, 0.5, 10.0, 3.0] > 0
  ).astype(np.int32)  # fmt: skip
  transitions, timestep = _last(environment, balance, 600)
  assert transitions == 500
  assert timestep.discount.tolist() == [1.0]
  environment.close()


def test_a_fall_is_a_termination_and_first_follows():
  environment = factory.make_vector(
    'envpool:CartPole-v1', num_environments=1, seed=0
  )
  _, timestep = _last(environment, lambda t: np.zeros(1, np.int32), 50)
  assert timestep.reward.tolist() == [1.0]
  assert timestep.discount.tolist() == [0.0]
  environment.send(np.ones(1, np.int32), np.zeros(1, np.int32))
  _, timestep = environment.recv(1.0)
  assert timestep.step_type.tolist() == [FIRST]
  assert np.abs(timestep.observation).max() <= 0.05  # A start state.
  environment.close()


def test_the_single_view_sees_the_same_ends():
  environment = factory.make('envpool:Pendulum-v1', seed=0)
  timestep, length = environment.reset(), 0
  while not timestep.last():
    timestep = environment.step(np.zeros(1, np.float32))
    length += 1
  assert (length, float(timestep.discount)) == (200, 1.0)
  assert environment.step(np.zeros(1, np.float32)).first()
  environment.close()


def test_actions_are_scaled():
  # Pendulum's own bounds are +-2; its reward holds 0.001 * action ** 2.
  def reward(action):
    environment = factory.make('envpool:Pendulum-v1', seed=0)
    environment.reset()
    return float(environment.step(np.array([action], np.float32)).reward)

  assert reward(0.0) - reward(1.0) == pytest.approx(0.004, abs=1e-4)


def test_parts_are_refused():
  environment = envpool_vector.EnvpoolVectorEnvironment(
    'CartPole-v1', num_environments=2, seed=0
  )
  ids, _ = environment.recv(1.0)
  with pytest.raises(ValueError, match='all 2 environments'):
    environment.send(np.zeros(1, np.int32), ids[:1])
  environment.close()
