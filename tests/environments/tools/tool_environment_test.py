"""Episodes of turns: what is read, what is answered, and how they end."""

import json
import unittest

import dm_env
from dm_env import test_utils
import numpy as np
import pytest
import turn_fakes

from tunix_reverb import errors
from tunix_reverb.environments import canonical
from tunix_reverb.environments import turns
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import episodes as episodes_lib
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import tool
from tunix_reverb.environments.tools import tool_environment
from tunix_reverb.text import characters

_FORMAT = characters.CharacterFormat()
_LIMITS = task.Limits(
  max_turns=3, max_turn_tokens=5, max_observation_tokens=6, max_tokens=40
)


@tool.tool(timeout_s=None)
def double(number: int) -> int:
  """Doubles a number."""
  if number == 13:
    raise ValueError('unlucky \ud800')
  return 2 * number


def _instance(generator, **kwargs):
  number = int(generator.integers(10, 50))

  def oracle(episode):
    if not episode.turns:
      return calls.Call('double', {'number': number})
    return episode.calls[0].result

  return task.Instance(
    **{
      'messages': [{'role': 'user', 'content': str(number)}],
      'tools': [double],
      'score': lambda e: float(e.answer == str(2 * number)),
      'turn_reward': lambda e: 0.25 * len(e.turns[-1].calls),
      'oracle': oracle,
      **kwargs,
    }
  )


class _Task(task.FunctionTask):
  character_limits = _LIMITS


def _make(seed=0, chat_format=_FORMAT, limits=None, episodes=None, **kwargs):
  return tool_environment.make(
    _Task(lambda generator: _instance(generator, **kwargs)),
    chat_format=chat_format,
    limits=limits,
    seed=seed,
    episodes=episodes,
  )


def _say(environment, text):
  """Steps with a turn that says `text`."""
  tokens = environment.chat_format.turn(text)
  length = environment.limits.max_turn_tokens
  return environment.step(turns.pack(tokens, length))


def _text(environment, timestep):
  tokens = turns.unpack(timestep.observation)
  return environment.chat_format.tokeniser.decode(tokens)


class ContractTest(test_utils.EnvironmentTestMixin, unittest.TestCase):
  """dm_env's own."""

  def make_object_under_test(self):
    return _make()


def test_it_is_canonical_as_it_is():
  environment = _make()
  assert canonical.canonicalise(environment) is environment
  action = canonical.ActionMap(environment.action_spec())
  turn = turns.pack([4, 1], 5)
  np.testing.assert_array_equal(action(turn), turn)
  assert environment.observation_spec().name == 'observation_tokens'
  assert environment.observation_spec().shape == (6,)
  assert environment.action_spec().name == 'turn_tokens'
  assert environment.action_spec().minimum == -1
  assert environment.action_spec().maximum == 15


def test_a_call_and_an_answer():
  environment = _make()
  first = environment.reset()
  number = int(_text(environment, first)[:-1])
  answered = _say(environment, f'{number}!')
  assert answered.step_type == dm_env.StepType.MID
  assert (answered.reward, answered.discount) == (0.25, 1.0)
  assert _text(environment, answered) == f'={2 * number}.'
  last = _say(environment, str(2 * number))
  assert last.step_type == dm_env.StepType.LAST
  assert (last.reward, last.discount) == (1.0, 0.0)
  assert turns.unpack(last.observation) == []
  episode = environment.transcript
  assert episode.outcome == 'terminated'
  assert episode.score == 1.0
  assert episode.total_reward == 1.25
  assert [m['role'] for m in episode.messages] == [
      'user', 'assistant', 'tool', 'assistant',
  ]  # fmt: skip
  assert [c.result for c in episode.calls] == [str(2 * number)]
  assert episode.errors() == {}
  assert environment.step(turns.pack([], 5)).first()


def test_the_oracle_plays_it():
  environment = _make()
  timestep = environment.reset()
  total = 0.0
  while not timestep.last():
    timestep = environment.step(environment.oracle())
    total += timestep.reward or 0.0
  assert total == 1.25


def test_an_oracle_whose_turns_do_not_fit_is_told():
  environment = _make(oracle=lambda e: '1234567')
  environment.reset()
  with pytest.raises(errors.UserError, match=r'max_turn_tokens \(5\) must'):
    environment.oracle()
  environment = _make(oracle=None)
  environment.reset()
  assert environment.oracle() is None


def test_a_turn_without_its_end_is_ended_by_the_environment():
  limits = task.Limits(max_turns=3, max_turn_tokens=2, max_tokens=40)
  environment = _make(
    limits=limits, next_messages=lambda e: [{'role': 'user', 'content': '7'}]
  )
  environment.reset()
  tokens = _FORMAT.tokeniser.encode('12')
  timestep = environment.step(turns.pack(tokens, 2))
  assert _text(environment, timestep) == '.7.'
  timestep = environment.step(turns.pack([*tokens[:1], 0], 2))
  assert _text(environment, timestep) == '7.'


def test_tokens_after_a_stop_token_do_not_count():
  environment = _make()
  environment.reset()
  environment.step(np.array([4, 0, 5, 1, 9], np.int32))
  assert environment.transcript.turns[0].tokens == [4, 0]
  assert environment.transcript.turns[0].text == '0'


def test_a_tools_error_is_read_by_the_policy_and_the_episode_goes_on():
  environment = _make()
  environment.reset()
  timestep = _say(environment, '13!')
  assert timestep.mid()
  assert _text(environment, timestep) == '=?.'
  assert environment.transcript.errors() == {'tool': 1}
  timestep = _say(environment, '+!')
  assert timestep.mid()
  assert environment.transcript.errors() == {'tool': 1, 'parser': 1}


def test_malformed_calls_are_read_by_the_policy():
  environment = _make(chat_format=turn_fakes.Chat(), limits=task.Limits())
  environment.reset()
  timestep = _say(
    environment,
    '<tool_call>{"name": "double"</tool_call>'
    '<tool_call>{"name": "double", "arguments": {"number": 13}}</tool_call>'
    '<tool_call>{"name": "halve"}</tool_call>',
  )
  assert timestep.mid()
  text = _text(environment, timestep)
  assert 'tool:error: ValueError: unlucky ?\n' in text
  assert "tool:error: there is no tool 'halve'; there is double\n" in text
  assert 'must be JSON' in text
  assert environment.transcript.errors() == {'tool': 1, 'parser': 2}
  json.dumps(environment.transcript.to_json())


def test_too_many_calls_in_one_turn_are_not_made():
  limits = task.Limits(max_turn_tokens=2000, max_observation_tokens=2000)
  environment = _make(chat_format=turn_fakes.Chat(), limits=limits)
  environment.reset()
  call = calls.render(calls.Call('double', {'number': 1}))
  text = _text(environment, _say(environment, call * 20))
  assert text.count('tool:2\n') == 8
  assert 'a turn may hold 8 calls, not 20' in text


def test_calls_of_a_turn_have_a_common_deadline():
  environment = _make(
    chat_format=turn_fakes.Chat(), limits=task.Limits(calls_s=0)
  )
  environment.reset()
  call = calls.render(calls.Call('double', {'number': 1}))
  text = _text(environment, _say(environment, call * 2))
  assert text.count('tool:error: no time is left in this turn') == 2
  assert environment.transcript.errors() == {'timeout': 2}


def test_too_many_turns_truncate_with_what_comes_next():
  environment = _make()
  environment.reset()
  assert _say(environment, '11!').mid()
  assert _say(environment, '11!').mid()
  last = _say(environment, '11!')
  assert last.last()
  assert (last.reward, last.discount) == (0.25, 1.0)
  assert _text(environment, last) == '=22.'
  episode = environment.transcript
  assert (episode.outcome, episode.cause) == ('truncated', 'max_turns')
  assert episode.score is None


def test_an_episode_is_truncated_when_no_whole_turn_would_fit():
  limits = task.Limits(
    max_turns=9, max_turn_tokens=5, max_observation_tokens=6, max_tokens=18
  )
  environment = _make(limits=limits)
  environment.reset()  # 3 tokens
  assert _say(environment, '11!').mid()  # 3 and 4: 10, and 5 fit
  last = _say(environment, '11!')  # 17: 5 do not
  assert (last.last(), last.discount) == (True, 1.0)
  assert environment.transcript.cause == 'max_tokens'
  assert environment.transcript.num_tokens == 17


def test_long_results_are_shortened_to_fit():
  limits = task.Limits(max_observation_tokens=30)
  say = 'x' * 20 + 'é' * 100
  environment = _make(
    chat_format=turn_fakes.Chat(),
    limits=limits,
    next_messages=lambda e: [{'role': 'user', 'content': say}],
  )
  environment.reset()
  timestep = _say(environment, 'hello')
  assert timestep.mid()
  text = _text(environment, timestep)
  assert text == 'user:' + 'x' * 20 + 'éé\n'
  # What is recorded is what was read.
  assert environment.transcript.messages[-1]['content'] == 'x' * 20 + 'éé'


def test_an_answer_that_cannot_be_shortened_enough_truncates():
  environment = _make(
    chat_format=turn_fakes.Chat(),
    limits=task.Limits(max_observation_tokens=8),
    next_messages=lambda e: [{'role': 'assistant', 'content': 'hello'}],
  )
  environment.reset()
  last = _say(environment, 'hello')
  assert (last.last(), last.discount) == (True, 1.0)
  assert environment.transcript.cause == 'max_observation_tokens'
  assert turns.unpack(last.observation) == []


def test_prompts_that_do_not_fit_are_passed_over():
  seen = set()

  class Lengths(_Task):
    def start(self, generator):
      content = '1' * int(generator.integers(1, 12))
      return _instance(
        generator, messages=[{'role': 'user', 'content': content}]
      )

  environment = tool_environment.make(
    Lengths(None), chat_format=_FORMAT, seed=3
  )
  for _ in range(60):
    seen.add(len(turns.unpack(environment.reset().observation)))
  assert seen == set(range(2, 7))
  assert environment.transcript.episode > 80


def test_a_limit_below_every_prompt_is_told():
  message = {'role': 'user', 'content': '1234567'}
  environment = _make(messages=[message])
  with pytest.raises(
    errors.UserError, match=r'max_observation_tokens \(6\).* last one of 8'
  ):
    environment.reset()


def test_instances_depend_on_seed_and_number_alone():
  first, second = _make(seed=5), _make(seed=5)
  second.reset()
  _say(second, '11!')  # What is played does not matter.
  prompts = [_text(first, first.reset()) for _ in range(10)]
  rest = [_text(second, second.reset()) for _ in range(9)]
  assert prompts[1:] == rest
  assert len(set(prompts)) > 5
  other = _make(seed=6)
  assert [_text(other, other.reset()) for _ in range(10)] != prompts


def test_a_prompt_that_nobody_answered_is_the_next_environments():
  episodes = episodes_lib.Episodes()
  late = _make(episodes=episodes.hold())
  late.reset()  # Too late: it was given up.
  environment = _make(episodes=episodes.hold())
  environment.reset()
  assert environment.transcript.episode == 0
  environment.reset()
  assert environment.transcript.episode == 1
  _say(environment, '11!')  # The first turn: it is played.
  again = _make(episodes=episodes.hold())
  again.reset()
  assert again.transcript.episode == 2
  _say(late, '11!')  # Counts for nobody.
  again.reset()
  assert again.transcript.episode == 3


def test_a_tasks_exception_fails_the_environment_and_is_recorded():
  seen = []

  def score(episode):
    raise RuntimeError('no judge')

  environment = tool_environment.make(
    _Task(lambda generator: _instance(generator, score=score)),
    chat_format=_FORMAT,
    seed=0,
    on_episode=seen.append,
  )
  environment.reset()
  with pytest.raises(RuntimeError, match='no judge'):
    _say(environment, '1')
  [episode] = seen
  assert episode.outcome == 'failed'
  assert 'no judge' in episode.cause
  assert episode.errors() == {'environment': 1}


def test_a_reward_that_is_no_number_fails_the_environment():
  environment = _make(score=lambda e: float('nan'))
  environment.reset()
  with pytest.raises(ValueError, match='must be finite'):
    _say(environment, '1')


def test_a_task_for_chat_models_refuses_characters():
  with pytest.raises(errors.UserError, match='must be played by a pretrained'):
    tool_environment.make(
      task.FunctionTask(_instance), chat_format=_FORMAT, seed=0
    )


def test_numbers_go_on_after_a_replacement():
  episodes = episodes_lib.Episodes()
  old = episodes.hold()
  old.use(old.peek())
  old.use(old.peek())
  new = episodes.hold()
  assert new.peek() == 2
  old.use(old.peek())  # Woke up late.
  assert new.peek() == 2
  new.use(4)  # Passed over two.
  assert new.peek() == 5


def test_a_reset_that_raises_uses_no_number():
  broken = [True]

  def start(generator):
    if broken:
      broken.pop()
      raise ConnectionError('down')
    return _instance(generator)

  environment = tool_environment.make(_Task(start), chat_format=_FORMAT, seed=0)
  with pytest.raises(ConnectionError):
    environment.reset()
  environment.reset()
  assert environment.transcript.episode == 0


def test_limits_must_leave_room():
  with pytest.raises(errors.UserError, match='must be > max_turn_tokens'):
    task.Limits(max_turn_tokens=10, max_tokens=10)
  with pytest.raises(errors.UserError, match='max_turns'):
    task.Limits(max_turns=0)
