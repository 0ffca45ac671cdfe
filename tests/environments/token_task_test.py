"""The token tasks: their contract, their rules, bounds from both sides."""

import unittest

from dm_env import test_utils
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.environments import factory
from tunix_reverb.environments import test_utils as vector_test_utils
from tunix_reverb.environments import token_task


class TokenTaskTest(test_utils.EnvironmentTestMixin, unittest.TestCase):
  def make_object_under_test(self):
    return token_task.make('reverse', seed=0)

  def make_action_sequence(self):
    yield from [5, 1, 2, 2, 2, 1, 0, 0, 0, 0, 1, 1]


class TokenVectorTest(
  vector_test_utils.VectorEnvironmentTestMixin, unittest.TestCase
):
  def make_object_under_test(self):
    return factory.make_vector('tokens:copy', num_environments=3, seed=0)

  def make_spec(self):
    return factory.environment_spec('tokens:copy')


def _episode(environment, policy):
  """(tokens, loss masks, turn ids, return) of one episode."""
  timestep, prompt, answer = environment.reset(), [], []
  tokens, masks, turns = [], [], []
  while True:
    observation = timestep.observation
    tokens.append(int(observation['token']))
    masks.append(bool(observation['loss_mask']))
    turns.append(int(observation['turn_id']))
    if timestep.last():
      return tokens, masks, turns, float(timestep.reward)
    if masks[-1]:
      prompt = tokens[: tokens.index(token_task.SEPARATOR)]
      answer = tokens[len(prompt) + 1 :]
      action = policy(prompt, answer)
    else:
      action = 15  # Ignored: the prompt goes on.
    timestep = environment.step(action)
    assert timestep.last() or timestep.reward == 0.0


def _reverse(prompt, answer):
  return [*prompt[::-1], token_task.END][len(answer)]


def _copy(prompt, answer):
  return [*prompt, token_task.END][len(answer)]


@pytest.mark.parametrize(
  'task,oracle', [('reverse', _reverse), ('copy', _copy)]
)
def test_an_oracle_scores_one_and_episodes_look_as_described(task, oracle):
  environment = token_task.make(task, seed=1)
  lengths = set()
  for _ in range(100):
    tokens, masks, turns, score = _episode(environment, oracle)
    assert score == 1.0
    count = tokens.index(token_task.SEPARATOR)
    lengths.add(count)
    assert len(tokens) == 2 * count + 2
    assert tokens[-1] == token_task.END
    assert min(tokens[:count]) >= token_task.FIRST_SYMBOL
    # Where the separator is seen, the policy chooses what comes next.
    assert masks[:-1] == [False] * count + [True] * (count + 1)
    assert turns[:-1] == [0] * count + [1] * (count + 1)
  assert lengths == {2, 3, 4}


def test_a_random_policy_scores_little():
  rng = np.random.default_rng(0)
  environment = token_task.make('reverse', seed=1)
  policy = lambda *_: int(rng.integers(token_task.VOCABULARY_SIZE))
  scores = [_episode(environment, policy)[-1] for _ in range(500)]
  assert 0.02 < np.mean(scores) < 0.1


def test_an_early_end_counts_what_is_missing_as_wrong():
  environment = token_task.make('copy/2', seed=1)
  policy = lambda prompt, answer: 0 if answer else prompt[0]
  tokens, _, _, score = _episode(environment, policy)
  assert len(tokens) == 5
  assert score == pytest.approx(1 / 3)


def test_an_answer_without_end_is_cut_where_it_should_be():
  environment = token_task.make('copy/2', seed=1)
  tokens, _, _, score = _episode(environment, lambda *_: 15)
  assert len(tokens) == 6
  assert score == 0.0


def test_the_number_in_the_name_bounds_the_prompt():
  environment = factory.make('tokens:reverse/7', seed=0)
  lengths = set()
  for _ in range(200):
    tokens, _, _, score = _episode(environment, _reverse)
    lengths.add(tokens.index(token_task.SEPARATOR))
    assert score == 1.0
  assert lengths == set(range(2, 8))


@pytest.mark.parametrize(
  'name,words',
  [
    ('sort', "token task ('sort') must be one of copy, reverse"),
    ('copy/1', "most symbols of a prompt ('1') must be a number >= 2"),
    ('copy/x', 'as in tokens:copy/8'),
    ('copy/', 'must be a number >= 2'),
  ],
)
def test_bad_names_are_refused(name, words):
  with pytest.raises(errors.UserError) as raised:
    factory.make(f'tokens:{name}', seed=0)
  assert words in str(raised.value)
