"""Turn environments by name: vectors of them, groups, replacements, owns."""

import sys
import threading
import types
import unittest

import dm_env
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.environments import factory
from tunix_reverb.environments import test_utils
from tunix_reverb.environments import turn_factory
from tunix_reverb.environments import turns
from tunix_reverb.environments.tools import task
from tunix_reverb.text import characters

_TIMEOUT_S = 20.0
_COPY_TURN_TOKENS = 9  # Of copy/8.


class SynchronousTest(test_utils.VectorEnvironmentTestMixin, unittest.TestCase):
  def make_object_under_test(self):
    return factory.make_vector('tool:lookup', num_environments=3, seed=0)

  def make_spec(self):
    return factory.environment_spec('tool:lookup')


class AsynchronousTest(SynchronousTest):
  def make_object_under_test(self):
    return factory.make_vector(
      'tool:lookup', num_environments=3, seed=0, mode='asynchronous'
    )


def doubling(generator):
  """A user's own task, as a function."""
  number = int(generator.integers(4))
  return task.Instance(
    messages=[{'role': 'user', 'content': str(number)}],
    score=lambda episode: float(episode.answer == str(2 * number)),
    oracle=lambda episode: str(2 * number),
  )


class Doubling(task.FunctionTask):
  """And as a class, which has limits."""

  character_limits = task.Limits(
    max_turn_tokens=2, max_observation_tokens=4, max_tokens=8
  )

  def __init__(self):
    super().__init__(doubling)


@pytest.fixture
def own_module(monkeypatch):
  module = types.ModuleType('own_tasks')
  module.doubling, module.Doubling = doubling, Doubling
  monkeypatch.setitem(sys.modules, 'own_tasks', module)


def test_a_users_own_class(own_module):
  environment = factory.make('tool:own_tasks:Doubling', seed=0)
  assert environment.observation_spec().shape == (4,)
  environment.reset()
  timestep = environment.step(environment.oracle())
  assert (timestep.last(), timestep.reward) == (True, 1.0)


def test_a_users_own_function_with_limits(own_module):
  limits = Doubling.character_limits
  options = turn_factory.TurnOptions(limits=limits)
  environment = factory.make(
    'tool:own_tasks:doubling', seed=0, turn_options=options
  )
  environment.reset()
  assert environment.step(environment.oracle()).reward == 1.0


def _receive_all(vector, num):
  """One timestep of each environment, in order."""
  observations, kinds = [None] * num, [None] * num
  while None in kinds:
    ids, timestep = vector.recv(_TIMEOUT_S)
    for row, index in enumerate(ids.tolist()):
      observations[index] = turns.unpack(timestep.observation[row])
      kinds[index] = timestep.step_type[row]
  return observations, kinds


def _end_all(vector, num):
  """Ends every episode, and receives LAST."""
  turn = turns.pack([4, 0], _COPY_TURN_TOKENS)
  ids = np.arange(num, dtype=np.int32)
  vector.send(np.stack([turn] * num), ids)
  _, kinds = _receive_all(vector, num)
  assert kinds == [dm_env.StepType.LAST] * num
  vector.send(np.stack([turn] * num), ids)


@pytest.mark.parametrize('mode', factory.MODES)
def test_groups_play_the_same_instances(mode):
  options = turn_factory.TurnOptions(group_size=3)
  vector = factory.make_vector(
    'tool:copy/8', num_environments=6, seed=0, mode=mode, turn_options=options
  )
  seen = []
  try:
    for _ in range(5):
      prompts, kinds = _receive_all(vector, 6)
      assert kinds == [dm_env.StepType.FIRST] * 6
      assert prompts[0] == prompts[1] == prompts[2]
      assert prompts[3] == prompts[4] == prompts[5]
      seen += [tuple(prompts[0]), tuple(prompts[3])]
      _end_all(vector, 6)
  finally:
    vector.close()
  assert len(set(seen)) == 10


def test_a_replaced_environment_goes_on_counting(monkeypatch):
  broken = threading.Event()

  class Breaks(Doubling):
    def start(self, generator):
      instance = super().start(generator)
      number = instance.messages[0]['content']

      def score(episode):
        del episode
        if broken.is_set():
          broken.clear()
          raise RuntimeError('on purpose')
        return float(number)

      return task.Instance(messages=instance.messages, score=score)

  module = types.ModuleType('breaking_tasks')
  module.Breaks = Breaks
  monkeypatch.setitem(sys.modules, 'breaking_tasks', module)
  options = turn_factory.TurnOptions(group_size=2)
  vector = factory.make_vector(
    'tool:breaking_tasks:Breaks',
    num_environments=2,
    seed=0,
    turn_options=options,
  )
  prompts, _ = _receive_all(vector, 2)
  turn = turns.pack([4, 0], 2)
  ids = np.arange(2, dtype=np.int32)
  broken.set()  # The first to be scored fails in its episode 0.
  vector.send(np.stack([turn] * 2), ids)
  replaced, kinds = _receive_all(vector, 2)
  assert kinds == [dm_env.StepType.FIRST, dm_env.StepType.LAST]
  assert vector.failures == {'error': 1, 'timeout': 0}
  vector.send(turn[None], ids[1:])
  _, timestep = vector.recv(_TIMEOUT_S)
  # Both are in episode 1.
  assert turns.unpack(timestep.observation[0]) == replaced[0]
  assert prompts[0] == prompts[1] != replaced[0]
  vector.close()


def test_transcripts_come_with_their_environments_index():
  seen = []
  options = turn_factory.TurnOptions(
    on_episode=lambda index, episode: seen.append((index, episode))
  )
  vector = factory.make_vector(
    'tool:copy/8', num_environments=2, seed=0, turn_options=options
  )
  _receive_all(vector, 2)
  _end_all(vector, 2)
  vector.close()
  assert [index for index, _ in seen] == [0, 1]
  assert {episode.outcome for _, episode in seen} == {'terminated'}
  assert {episode.episode for _, episode in seen} == {0}
  assert seen[0][1].seed != seen[1][1].seed


def test_environments_must_make_whole_groups():
  with pytest.raises(
    errors.UserError, match=r'\(5\) must be a multiple of group_size \(2\)'
  ):
    factory.make_vector(
      'tool:copy',
      num_environments=5,
      seed=0,
      turn_options=turn_factory.TurnOptions(group_size=2),
    )
  with pytest.raises(errors.UserError, match='group_size'):
    turn_factory.TurnOptions(group_size=0)


def test_the_default_format_is_characters():
  environment = factory.make('tool:copy', seed=0)
  assert isinstance(environment.chat_format, characters.CharacterFormat)


def test_a_name_without_a_task_is_refused():
  with pytest.raises(errors.UserError, match='must name one after the colon'):
    factory.make('tool:', seed=0)
