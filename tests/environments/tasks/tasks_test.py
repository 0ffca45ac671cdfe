"""Calculator, code, latency and reasoning_gym: rules and perfect policies."""

import contextlib
import time

import numpy as np
import pytest
import turn_fakes

from tunix_reverb import errors
from tunix_reverb.environments import check
from tunix_reverb.environments import factory
from tunix_reverb.environments import turn_factory
from tunix_reverb.environments import turns
from tunix_reverb.environments.tasks import bonus
from tunix_reverb.environments.tasks import code
from tunix_reverb.environments.tasks import code_problems
from tunix_reverb.environments.tasks import reasoning
from tunix_reverb.environments.tools import bubblewrap
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import monty
from tunix_reverb.environments.tools import sandbox
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import tool_environment

_CHAT = turn_factory.TurnOptions(chat_format=turn_fakes.Chat())
_LONG_CHAT = turn_factory.TurnOptions(
  chat_format=turn_fakes.Chat(),
  limits=task.Limits(max_observation_tokens=8000, max_tokens=10_000),
)


def _play(environment, policy):
  timestep, total = environment.reset(), 0.0
  while not timestep.last():
    timestep = environment.step(policy())
    total += timestep.reward
  return total


def _say(environment, text):
  tokens = environment.chat_format.turn(text)
  return environment.step(
    turns.pack(tokens, environment.limits.max_turn_tokens)
  )


def _text(environment, timestep):
  tokens = turns.unpack(timestep.observation)
  return environment.chat_format.tokeniser.decode(tokens)


@pytest.mark.parametrize('name', ['calculator', 'calculator/4', 'calculator/1'])
@pytest.mark.parametrize('options', [None, _CHAT])
def test_a_perfect_policy_calculates(name, options):
  environment = factory.make(f'tool:{name}', seed=0, turn_options=options)
  for _ in range(50):
    assert _play(environment, environment.oracle) == pytest.approx(1.1)


def test_a_random_policy_does_not_calculate():
  environment = factory.make('tool:calculator', seed=0)
  generator = np.random.default_rng(0)
  policy = lambda: check.sample_action(environment.action_spec(), generator)
  scores = [_play(environment, policy) for _ in range(400)]
  assert np.mean(scores) < 0.1


def test_the_last_number_of_an_answer_counts():
  environment = factory.make('tool:calculator', seed=0, turn_options=_CHAT)
  timestep = environment.reset()
  question = _text(environment, timestep).rpartition('user:')[2].strip()
  expected = eval(question)
  timestep = _say(environment, f'{question} is {expected:,}.')
  assert (timestep.last(), timestep.reward) == (True, 1.0)
  environment.reset()
  assert _say(environment, 'I do not know').reward == 0.0


def test_the_bonus_is_for_the_first_call_that_works():
  environment = factory.make('tool:calculator/2/0.5', seed=0)
  environment.reset()
  assert _say(environment, '+!').reward == 0.0
  assert _say(environment, '1+1!').reward == 0.5
  last = _say(environment, '1+1!')
  assert (last.reward, last.discount) == (0.0, 1.0)
  assert environment.transcript.cause == 'max_turns'
  assert environment.transcript.errors() == {'tool': 1}


def test_bonus_arguments():
  read = lambda text: bonus.parse('x', text, what='n', default=3)
  assert read('') == (3, 0.1)
  assert read('5') == (5, 0.1)
  assert read('/0') == (3, 0.0)
  with pytest.raises(errors.UserError, match='as in tool:x/3/'):
    read('5/2')


@pytest.fixture(
  params=[bubblewrap.Bubblewrap, monty.Monty], ids=['bubblewrap', 'monty']
)
def box(request):
  try:
    made = request.param(sandbox.Limits(cpu_s=1))
  except errors.UserError as e:
    pytest.skip(str(e))
  with contextlib.closing(made):
    yield made


def _code_environment(box, max_answers=1, seed=0):
  class Kept(code.CodeTask):
    def close(self):  # The fixture's.
      pass

  return tool_environment.make(
    Kept(max_answers=max_answers, sandbox=box),
    chat_format=turn_fakes.Chat(),
    limits=task.Limits(
      max_turn_tokens=1000, max_observation_tokens=2000, max_tokens=9000
    ),
    seed=seed,
  )


def test_every_problem_is_solved_by_its_solution(box):
  environment = _code_environment(box)
  seen = set()
  for _ in range(40):
    text = _text(environment, environment.reset())
    name = text.partition('function ')[2].partition('(')[0]
    if name not in seen:
      seen.add(name)
      assert environment.step(environment.oracle()).reward == 1.0, name
  assert seen == {problem.name for problem in code_problems.PROBLEMS}


def test_problems_differ_within_themselves():
  for problem in code_problems.PROBLEMS:
    generator = np.random.default_rng(0)
    answers = [problem.solve(*problem.draw(generator)) for _ in range(20)]
    assert len({repr(answer) for answer in answers}) > 1, problem.name


def _seed_of(name, box):
  """An environment whose first problem is `name`, and its first prompt."""
  for seed in range(200):
    environment = _code_environment(box, max_answers=2, seed=seed)
    text = _text(environment, environment.reset())
    if f'function {name}(' in text:
      return environment, text
  raise AssertionError(name)


def test_a_wrong_answer_is_explained_and_tried_again(box):
  environment, text = _seed_of('add', box)
  assert text.count(') == ') == 2
  timestep = _say(environment, '```python\ndef add(a, b):\n  return a - b\n```')
  assert timestep.mid()
  answer = _text(environment, timestep)
  assert 'of 8 inputs are right' in answer
  assert 'should be' in answer
  # Only examples that were shown are named.
  named = answer.partition('add(')[2].partition(')')[0]
  assert f'add({named})' in text
  timestep = environment.step(environment.oracle())
  assert (timestep.last(), timestep.reward) == (True, 1.0)


def test_an_answer_may_be_partly_right(box):
  environment, _ = _seed_of('largest', box)
  _say(environment, 'It is easy.')
  timestep = _say(
    environment, '```python\ndef largest(numbers):\n  return max(numbers)\n```'
  )
  assert timestep.last()
  assert 0.0 < timestep.reward <= 1.0
  assert 'no block' in environment.transcript.messages[-2]['content']


@pytest.mark.parametrize(
  'body,words',
  [
    ('raise ValueError("no")', 'not ValueError: no'),
    ('while True:\n    pass', 'it took too long'),
    ('return "x" * 2000', 'should be'),
    ('return', 'not None'),
    ('return 1 == 1', 'not True'),
    ('return lambda: 1', 'it did not run'),
  ],
)
def test_what_is_wrong_is_told(box, body, words):
  environment, _ = _seed_of('add', box)
  timestep = _say(environment, f'```python\ndef add(a, b):\n  {body}\n```')
  assert timestep.mid()
  text = _text(environment, timestep)
  assert words in text
  assert len(text) < 1500
  assert environment.transcript.turns[0].reward == 0.0


def test_a_program_that_prints_its_own_verdict_gains_nothing(box):
  environment, _ = _seed_of('add', box)
  timestep = _say(
    environment,
    '```python\nclass Same:\n  def __eq__(self, other):\n    return True\n'
    '  def __repr__(self):\n    return "1"\n'
    'def add(a, b):\n  return Same()\n```',
  )
  assert timestep.mid()
  assert environment.transcript.turns[0].reward == 0.0


def test_programs_may_be_tried_before_the_answer(box):
  environment, _ = _seed_of('add', box)
  call = calls.render(calls.Call('python', {'code': 'print(6 * 7)'}))
  timestep = _say(environment, f'Let me try. {call}')
  assert timestep.mid()
  assert _text(environment, timestep) == 'tool:42\n\n'
  call = calls.render(calls.Call('python', {'code': 'while True: pass'}))
  text = _text(environment, _say(environment, call))
  assert 'error: the program was stopped: it took too long' in text
  assert environment.transcript.errors() == {'sandbox': 1}
  assert environment.step(environment.oracle()).reward == 1.0


def test_code_is_by_name_and_for_chat_models():
  environment = factory.make('tool:code/3', seed=0, turn_options=_CHAT)
  environment.close()
  with pytest.raises(errors.UserError, match='must be played by a pretrained'):
    factory.make('tool:code', seed=0)
  with pytest.raises(errors.UserError, match='must be a number >= 1'):
    factory.make('tool:code/0', seed=0, turn_options=_CHAT)


@pytest.mark.parametrize('kind', ['constant', 'exponential', 'lognormal'])
def test_latency_is_as_long_as_it_says(kind):
  environment = factory.make(f'tool:latency/0.01/4/{kind}', seed=0)
  start = time.monotonic()
  policy = environment.action_spec().generate_value
  assert _play(environment, policy) == 1.0
  elapsed_s = time.monotonic() - start
  waits = [call.arguments['delay_s'] for call in environment.transcript.calls]
  assert len(waits) == 4
  assert elapsed_s >= sum(waits) > 0
  if kind == 'constant':
    assert waits == [0.01] * 4
  else:
    assert len(set(waits)) == 4


@pytest.mark.parametrize('kind', ['exponential', 'lognormal'])
def test_latencies_have_the_mean_that_was_asked_for(kind):
  environment = factory.make(f'tool:latency/0.5/20000/{kind}', seed=0)
  delays_s = environment._task._draw(np.random.default_rng(0))
  assert np.mean(delays_s) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
  'name', ['-1', 'x', '1/0', '1/2/normal', '1/2/constant/3', '1/2.5']
)
def test_bad_latencies_are_refused(name):
  with pytest.raises(errors.UserError, match='of tool:latency must be seconds'):
    factory.make(f'tool:latency/{name}', seed=0)


def _reasoning(name, seed=0):
  pytest.importorskip('reasoning_gym', reason='reasoning-gym is missing')
  return factory.make(
    f'reasoning_gym:{name}', seed=seed, turn_options=_LONG_CHAT
  )


@pytest.mark.parametrize(
  'name', ['chain_sum', 'leg_counting', 'simple_equations']
)
def test_reasoning_is_scored_by_its_dataset(name):
  environment = _reasoning(name)
  for _ in range(5):
    assert _play(environment, environment.oracle) == 1.0
    environment.reset()
    assert _say(environment, '<answer>nothing</answer>').reward < 0.5


def test_an_answer_without_tags_counts_as_a_whole():
  environment = _reasoning('chain_sum/min_terms=2/max_terms=2')
  question = _text(environment, environment.reset())
  assert len(question.rpartition(':')[2].split()) == 4  # 1 + 2 =
  oracle = turns.unpack(environment.oracle())
  text = environment.chat_format.text(oracle)
  answer = text.removeprefix('<answer>').removesuffix('</answer>')
  assert _say(environment, f' {answer}\n').reward == 1.0


def test_problems_depend_on_seed_and_number_alone():
  first, again, other = (_reasoning('chain_sum', seed) for seed in (1, 1, 2))
  read = lambda e: [_text(e, e.reset()) for _ in range(4)]
  questions = read(first)
  assert questions == read(again)
  assert questions != read(other)
  assert len(set(questions)) == 4


_EXPLOITS = [
  '__import__("os").system("true")',
  'exec(chr(49))',
  '[].__class__',
  'open("x")',
  'x.real',
  '(lambda: 1)()',
  '[y for y in (1, 2)]',
  '9**9**9',
  '2**100000',
  'sin(exec)',
  'f"{1}"',
  '"a" * 2; 1',
]


@pytest.mark.parametrize('answer', _EXPLOITS)
def test_no_answer_is_evaluated_that_is_no_arithmetic(answer):
  assert not reasoning.is_harmless(answer)


@pytest.mark.parametrize(
  'answer', ['(1 + 2) * 3 / 4', '3*x**2 + sin(x) + C', "['a', 'b']", '-1.5']
)
def test_arithmetic_is_harmless(answer):
  assert reasoning.is_harmless(answer)


@pytest.mark.parametrize(
  'name', ['countdown', 'simple_integration', 'string_insertion', 'n_queens']
)
def test_datasets_that_evaluate_answers_are_known(name, monkeypatch):
  environment = _reasoning(name)
  assert environment._task._evaluates
  assert _play(environment, environment.oracle) == 1.0

  def score_answer(self, answer, entry):
    raise AssertionError(f'evaluated {answer}')

  dataset = environment._task._make(seed=0)
  monkeypatch.setattr(type(dataset), 'score_answer', score_answer)
  for answer in _EXPLOITS:
    environment.reset()
    assert _say(environment, f'<answer>{answer}</answer>').reward == 0.0


def test_other_datasets_score_any_text():
  assert not _reasoning('propositional_logic')._task._evaluates
  assert not _reasoning('chain_sum')._task._evaluates


@pytest.mark.parametrize(
  'name,words',
  [
    ('chain_sums', "dataset ('chain_sums') must be one of the"),
    ('chain_sums', 'chain_sum'),
    ('chain_sum/terms=2', 'of reasoning_gym:chain_sum must be its own'),
    ('chain_sum/min_terms=9/max_terms=2', 'max_terms must be >= min_terms'),
    ('chain_sum/min_terms', 'must be a name and a value'),
  ],
)
def test_bad_datasets_are_refused(name, words):
  with pytest.raises(errors.UserError) as raised:
    _reasoning(name)
  assert words in str(raised.value)
