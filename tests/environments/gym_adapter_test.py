"""Gymnasium to dm_env: spaces, actions, and the two ways to end."""

import unittest

import dm_env
from dm_env import test_utils
import numpy as np
import pytest

gymnasium = pytest.importorskip('gymnasium', reason='gymnasium is missing')
fakes = pytest.importorskip('fakes', reason='gymnasium is missing')
from gymnasium import spaces  # noqa: E402

from tunix_reverb import errors  # noqa: E402
from tunix_reverb.environments import canonical  # noqa: E402
from tunix_reverb.environments import gym_adapter  # noqa: E402

FIRST, MID, LAST = dm_env.StepType


class CartPoleTest(test_utils.EnvironmentTestMixin, unittest.TestCase):
  def make_object_under_test(self):
    return gym_adapter.GymEnvironment(
      gymnasium.make('CartPole-v1', disable_env_checker=True), seed=0
    )


class NestedTest(test_utils.EnvironmentTestMixin, unittest.TestCase):
  def make_object_under_test(self):
    space = spaces.Dict(
      image=spaces.Box(0, 255, (4, 4, 3), np.uint8),
      rest=spaces.Tuple(
        [
          spaces.Discrete(5, start=2),
          spaces.MultiDiscrete([2, 3]),
          spaces.MultiBinary(3),
          spaces.Box(-1.0, 1.0, (), np.float64),
          spaces.Dict(x=spaces.Box(-5, 5, (2,), np.int64)),
        ]
      ),
    )
    return gym_adapter.GymEnvironment(
      fakes.Gym(space, spaces.MultiDiscrete([2, 4])), seed=0
    )


def _timeline(environment, num_steps):
  """(step_type, reward, discount, observation) of the first timesteps."""
  timesteps = [environment.reset()]
  timesteps += [environment.step(0) for _ in range(num_steps)]
  return [
    (t.step_type, t.reward, t.discount, float(t.observation[0]))
    for t in timesteps
  ]


@pytest.mark.parametrize(
  ('ending', 'discount'),
  [('terminated', 0.0), ('truncated', 1.0), ('both', 0.0)],
)
def test_golden_timeline_of_an_episodes_end(ending, discount):
  environment = gym_adapter.GymEnvironment(fakes.Gym(ending=ending))
  assert _timeline(environment, 4) == [
    (FIRST, None, None, 0.0),
    (MID, 1.0, 1.0, 1.0),
    (LAST, 1.0, discount, 2.0),  # The final observation, not the next first.
    (FIRST, None, None, 0.0),
    (MID, 1.0, 1.0, 1.0),
  ]


@pytest.mark.parametrize(
  ('ending', 'discount'), [('neither', 1.0), ('terminated', 0.0)]
)
def test_golden_timeline_of_our_own_time_limit(ending, discount):
  environment = gym_adapter.GymEnvironment(
    fakes.Gym(ending=ending), max_episode_steps=2
  )
  assert _timeline(environment, 3)[2:] == [
    (LAST, 1.0, discount, 2.0),
    (FIRST, None, None, 0.0),
  ]


def test_the_time_limit_counts_anew_after_a_reset():
  environment = gym_adapter.GymEnvironment(
    fakes.Gym(ending='neither'), max_episode_steps=3
  )
  environment.reset()
  environment.step(0)
  environment.step(0)
  assert [t[0] for t in _timeline(environment, 3)] == [FIRST, MID, MID, LAST]


@pytest.mark.parametrize(
  ('space', 'ours', 'theirs'),
  [
    (spaces.Discrete(3, start=-1), 2, 1),
    (spaces.Discrete(3), np.int32(2), 2),
    (spaces.MultiDiscrete([2, 3]), [1, 2], [1, 2]),
    (spaces.MultiDiscrete([2, 3], start=[5, 7]), [1, 2], [6, 9]),
    (spaces.MultiDiscrete([[2, 3], [4, 5]]), [1, 2, 3, 4], [[1, 2], [3, 4]]),
    (spaces.MultiBinary(3), [1, 0, 1], [1, 0, 1]),
    (spaces.Box(-2.0, 6.0, (2,), np.float32), [-1.0, 0.5], [-2.0, 4.0]),
    (spaces.Box(-2.0, 6.0, (1, 2), np.float64), [9.0, 0.0], [[6.0, 2.0]]),
    (spaces.Box(0.0, np.inf, (2,), np.float32), [-3.0, 3.0], [0.0, 3.0]),
  ],
)
def test_canonical_actions_reach_the_environment(space, ours, theirs):
  inner = fakes.Gym(action_space=space)
  environment = canonical.canonicalise(gym_adapter.GymEnvironment(inner))
  ours = np.asarray(ours, environment.action_spec().dtype)
  assert ours.shape == environment.action_spec().shape
  environment.reset()
  environment.step(ours)
  environment.reset()
  environment.step_raw(int(ours) if ours.shape == () else ours)
  # `fakes.Gym.step` asserts that the space contains them.
  for action in inner.actions:
    np.testing.assert_allclose(action, theirs)


def test_specs_are_named_and_narrowed():
  environment = gym_adapter.GymEnvironment(
    fakes.Gym(spaces.Dict(a=spaces.Box(-1e308, 1e308, (2,), np.float64)))
  )
  spec = environment.observation_spec()['a']
  assert (spec.name, spec.dtype) == ('observation/a', np.float32)
  assert np.all(np.isinf(spec.maximum))


def test_the_seed_is_used_once():
  inner = fakes.Gym()
  environment = gym_adapter.GymEnvironment(inner, seed=7)
  environment.reset()
  environment.reset()
  assert inner.seeds == [7, None]


@pytest.mark.parametrize('kind', ['observation', 'action'])
def test_an_unsupported_space_is_named(kind):
  space = spaces.Text(5)
  with pytest.raises(errors.UserError, match=rf'{kind} space \(Text'):
    gym_adapter.GymEnvironment(fakes.Gym(**{f'{kind}_space': space}))
