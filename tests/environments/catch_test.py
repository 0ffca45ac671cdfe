"""The built-in Catch: its contract, its rules, bsuite's results."""

import unittest

from dm_env import test_utils
import numpy as np
import pytest

from tunix_reverb.environments import catch


class CatchTest(test_utils.EnvironmentTestMixin, unittest.TestCase):
  def make_object_under_test(self):
    return catch.Catch(seed=0)

  def make_action_sequence(self):
    yield from [0, 1, 2, 2, 2, 1, 0, 0, 0, 0, 1, 1]


def _play(environment, policy, num_episodes):
  """Returns of `num_episodes` episodes, all of 9 transitions."""
  returns = []
  for _ in range(num_episodes):
    timestep, length, total = environment.reset(), 0, 0.0
    while not timestep.last():
      timestep = environment.step(policy(timestep.observation))
      total += timestep.reward
      length += 1
    assert length == 9
    assert timestep.discount == 0.0
    returns.append(total)
  return returns


def _follow_the_ball(board):
  ball = int(np.argmax(board[:-1].max(0)))
  paddle = int(np.argmax(board[-1]))
  return 1 + int(np.sign(ball - paddle))


def test_following_the_ball_always_catches_it():
  returns = _play(catch.Catch(seed=3), _follow_the_ball, 50)
  assert returns == [1.0] * 50


def test_fleeing_the_ball_never_does():
  returns = _play(catch.Catch(seed=3), lambda b: 2 - _follow_the_ball(b), 50)
  # The ball above the middle is not fled from, as the paddle stays.
  assert set(returns) == {-1.0, 1.0}


def test_the_seed_decides():
  def columns(seed):
    environment = catch.Catch(seed=seed)
    return [int(environment.reset().observation[0].argmax()) for _ in range(40)]

  assert columns(1) == columns(1)
  assert columns(1) != columns(2)
  assert set(columns(1)) == {0, 1, 2, 3, 4}


def test_observations_are_read_only_as_they_are_shared():
  with pytest.raises(ValueError, match='read-only'):
    catch.Catch(seed=0).reset().observation[0, 0] = 1.0


def test_boards_and_rewards_equal_bsuites():
  bsuite_catch = pytest.importorskip(
    'bsuite.environments.catch', reason='bsuite is not installed'
  )
  actions = np.random.default_rng(0).integers(3, size=9 * 20)
  theirs, ours = bsuite_catch.Catch(seed=0), catch.Catch(seed=0)
  expected, actual = theirs.reset(), ours.reset()
  for action in actions.tolist():
    if expected.first():
      # Their ball column comes from another generator.
      ours._ball = theirs._ball_x
      actual = catch._TIMESTEPS[0][ours._ball][ours._paddle]
    np.testing.assert_array_equal(actual.observation, expected.observation)
    assert actual[:3] == expected[:3]
    expected, actual = theirs.step(action), ours.step(action)
