"""Copy, reverse and look-up: rules, and bounds from both sides."""

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.environments import check
from tunix_reverb.environments import factory
from tunix_reverb.environments import turns


def _play(environment, policy):
  """Returns the return of one episode."""
  timestep, total = environment.reset(), 0.0
  while not timestep.last():
    timestep = environment.step(policy())
    total += timestep.reward
  return total


def _mean_random(name, num=600):
  environment = factory.make(name, seed=1)
  generator = np.random.default_rng(0)
  spec = environment.action_spec()
  policy = lambda: check.sample_action(spec, generator)
  return np.mean([_play(environment, policy) for _ in range(num)])


def _say(environment, text):
  tokens = environment.chat_format.turn(text)
  return environment.step(
    turns.pack(tokens, environment.limits.max_turn_tokens)
  )


@pytest.mark.parametrize(
  'name,most',
  [
    ('copy', 1.0),
    ('reverse', 1.0),
    ('reverse/8', 1.0),
    ('lookup', 1.1),
    ('lookup/2', 1.1),
    ('lookup/1/0', 1.0),
  ],
)
def test_a_perfect_policy_gets_all_and_a_random_one_little(name, most):
  environment = factory.make(f'tool:{name}', seed=1)
  for _ in range(50):
    assert _play(environment, environment.oracle) == pytest.approx(most)
  assert 0.0 < _mean_random(f'tool:{name}') < 0.1


def test_prompts_of_every_length_come():
  environment = factory.make('tool:copy/5', seed=0)
  lengths = {
    len(turns.unpack(environment.reset().observation)) for _ in range(100)
  }
  assert lengths == {3, 4, 5, 6}  # The end is one.


@pytest.mark.parametrize(
  'answer,score', [('01', 1.0), ('0', 1 / 3), ('02', 2 / 3), ('222', 0.0)]
)
def test_reversals_are_scored_by_position(answer, score):
  environment = factory.make('tool:reverse/2', seed=1)
  asked = environment.chat_format.text(
    turns.unpack(environment.reset().observation)
  )
  swap = {'0': asked[1], '1': asked[0], '2': '9'}
  tokens = environment.chat_format.turn(''.join(swap[c] for c in answer))
  timestep = environment.step(turns.pack(tokens[:3], 3))
  assert timestep.last()
  assert timestep.reward == pytest.approx(score)


def test_a_call_where_there_is_no_tool_ends_the_turn_task():
  environment = factory.make('tool:copy', seed=1)
  environment.reset()
  timestep = _say(environment, '!')
  assert (timestep.last(), timestep.discount) == (True, 0.0)
  assert environment.transcript.errors() == {'parser': 1}


def _look_up(seed=1):
  environment = factory.make('tool:lookup', seed=seed)
  timestep = environment.reset()
  key = environment.chat_format.text(turns.unpack(timestep.observation))
  return environment, key


def test_a_bare_call_looks_up_what_was_asked_for():
  environment, _ = _look_up()
  timestep = _say(environment, '!')
  assert timestep.reward == pytest.approx(0.1)
  text = environment.chat_format.text(turns.unpack(timestep.observation))
  assert text[0] == '='
  assert _say(environment, text[1:]).reward == 1.0


def test_a_wrong_key_is_an_error_without_bonus():
  environment, key = _look_up()
  wrong = '9' if key != '9' else '8'
  timestep = _say(environment, f'{wrong}!')
  assert (timestep.mid(), timestep.reward) == (True, 0.0)
  assert environment.transcript.errors() == {'tool': 1}
  # The second turn is the last, whatever it is.
  timestep = _say(environment, '!')
  assert (timestep.last(), timestep.discount) == (True, 0.0)
  assert timestep.reward == pytest.approx(0.1)
  assert environment.transcript.score == 0.0


def test_without_the_call_the_score_stays_at_chance():
  environment = factory.make('tool:lookup', seed=2)
  scores = []
  for _ in range(800):
    environment.reset()
    scores.append(_say(environment, '3').reward)
  assert set(scores) == {0.0, 1.0}
  assert 0.08 < np.mean(scores) < 0.18  # 1 / 8.


def test_more_symbols_than_asked_for_count_as_wrong():
  environment, _ = _look_up()
  result = environment.chat_format.text(
    turns.unpack(_say(environment, '!').observation)
  )[1:]
  assert _say(environment, result + '99').reward == pytest.approx(1 / 3)


def test_a_look_up_is_eight_to_eleven_tokens():
  lengths = set()
  environment = factory.make('tool:lookup/2', seed=0)
  for _ in range(200):
    timestep = environment.reset()
    _say(environment, '!')
    _say(environment, environment.transcript.calls[0].result)
    lengths.add(environment.transcript.num_tokens)
  del timestep
  assert lengths == set(range(8, 13))


@pytest.mark.parametrize(
  'name,words',
  [
    ('copy/1', "most symbols of a prompt ('1') must be a number >= 2"),
    ('reverse/x', 'as in tool:reverse/8'),
    ('lookup/0', "argument ('0') of tool:lookup must be"),
    ('lookup/x', 'as in tool:lookup/1/0.1'),
    ('lookup/1/7', 'the reward of a call, 0 to 1'),
    ('lokup', "task ('lokup') must be one of copy, reverse, lookup, c"),
    ('lokup', 'did you mean lookup?'),
    ('no_such_module:f', "task ('no_such_module:f') must name an importable"),
    ('json:nothing', 'must name a function of a generator, or a subclass of'),
    ('json:JSONDecoder', 'of the module json'),
  ],
)
def test_bad_names_are_refused(name, words):
  with pytest.raises(errors.UserError) as raised:
    factory.make(f'tool:{name}', seed=0)
  assert words in str(raised.value)
