"""The parts of `benchmarks.utilisation` that decide what it says."""

import importlib.util
import pathlib
import sys
import xml.etree.ElementTree

import dm_env
import numpy as np
import pytest

from tunix_reverb.environments import turns
from tunix_reverb.environments.tools import tool_environment
from tunix_reverb.telemetry import reader as reader_lib
from tunix_reverb.text import characters

_DIRECTORY = pathlib.Path(__file__).parents[2] / 'benchmarks'


def _load(name: str):
  """Loaded by its file: the wheel that is tested has no benchmarks."""
  spec = importlib.util.spec_from_file_location(name, _DIRECTORY / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  # Dataclasses look their module up.
  sys.modules[spec.name] = module
  spec.loader.exec_module(module)
  return module


@pytest.fixture(name='environment')
def _environment():
  environment = tool_environment.make(
    _load('slow_lookup').SwiftLookup(),
    chat_format=characters.CharacterFormat(),
    seed=0,
  )
  yield environment
  environment.close()


def _turn(environment, text: str) -> dm_env.TimeStep:
  tokens = characters.CharacterFormat().turn(text)
  return environment.step(
    turns.pack(tokens, environment.limits.max_turn_tokens)
  )


def test_whoever_asks_and_says_what_was_answered_earns_all(environment):
  for _ in range(8):
    environment.reset()
    asked = environment.step(environment.oracle())
    answered = environment.step(environment.oracle())
    assert asked.mid() and asked.reward == pytest.approx(0.5)
    assert answered.last() and answered.discount == 0
    assert answered.reward == 1.0
  # Both logs have been read, and hardly anything was written.
  assert sum(len(turn.tokens) for turn in environment.transcript.turns) == 3
  assert environment.transcript.num_tokens > 16 * 3


@pytest.mark.parametrize(('second', 'reward'), [('!', -0.5), ('7', 0.0)])
def test_whoever_asks_and_does_not_answer_earns_the_call_at_most(
  environment, second, reward
):
  environment.reset()
  assert _turn(environment, '!').reward == pytest.approx(0.5)
  timestep = _turn(environment, second)
  assert timestep.last() and timestep.reward == pytest.approx(reward)


def test_whoever_does_not_ask_reads_as_much_without_an_answer(environment):
  environment.reset()
  timestep = _turn(environment, '7')
  read = environment.transcript.turns[0].observation
  assert timestep.mid() and timestep.reward == 0
  assert len(read) > _load('slow_lookup').LEAST_NOISE
  text = characters.CharacterFormat().tokeniser.decode(read)
  assert not set(text) & set('01234567')


def test_waits_are_heavy_tailed_and_bounded():
  slow_lookup = _load('slow_lookup')
  generator = np.random.default_rng(0)
  waits_s = [slow_lookup.draw_wait_s(generator) for _ in range(20_000)]
  mean_s = slow_lookup.MEAN_S
  # The cut takes a few per cent off the mean.
  assert 0.9 * mean_s < np.mean(waits_s) < mean_s
  assert np.median(waits_s) < 0.7 * mean_s
  assert max(waits_s) == slow_lookup.LONGEST_S >= 4 * mean_s


def _row(time_s: float, step: int, **values: float) -> reader_lib.Row:
  of_all = {
    'learner_step': step,
    'transitions_total': 100.0 * step,
    'admission_hold_s_total': 0.0,
    'utilisation_compute': 0.0,
    'utilisation_waiting': 0.0,
    'utilisation_publishing': 0.0,
    'utilisation_other': 0.0,
    'policy_lag_mean': 1.0,
    'policy_lag_max': 2.0,
    'batch_fill': 0.5,
    'ess': 0.9,
    'dropped_lag_total': 0.0,
    'dropped_age_total': 0.0,
    'dropped_poison_total': 0.0,
  }
  return reader_lib.Row(time_s, 'learner', step, of_all | values)


def test_shares_weigh_each_report_by_its_interval():
  pipeline = _load('utilisation_pipeline')
  watched = pipeline.Watched(
    learner=[
      _row(10.0, 1, utilisation_waiting=1.0),  # Before the window.
      _row(13.0, 4, utilisation_compute=1.0, policy_lag_max=5.0),
      _row(
        14.0,
        5,
        utilisation_compute=0.2,
        utilisation_waiting=0.8,
        admission_hold_s_total=0.6,
        dropped_age_total=3.0,
      ),
    ],
    actor=[],
    first_update_s=7.0,
    cpu_s={'learner': 3.0},
  )
  figures = pipeline.figures(watched)
  shares = figures['shares']
  assert shares['compute'] == pytest.approx((3 * 1.0 + 0.2) / 4)
  assert shares['admission'] == pytest.approx(0.6 / 4)
  assert shares['starved'] == pytest.approx((0.8 - 0.6) / 4)
  assert sum(shares.values()) == pytest.approx(1.0)
  assert (figures['updates'], figures['tokens']) == (4, 400)
  assert (figures['dropped'], figures['policy_lag_max']) == (3, 5.0)


def test_picture_says_how_busy_each_learner_was():
  result = lambda compute: {
    'shares': {'compute': compute, 'tools': 1 - compute},
    'updates': 50,
    'tokens': 123_400,
    'wall_s': 100.0,
  }
  svg = _load('utilisation_plot').draw(
    {
      'serial': result(0.011),
      'batched': result(0.222),
      'pipeline': result(0.967),
    },
    {name: [(5.0, 0.1), (50.0, 0.4)] for name in ('serial', 'batched')}
    | {'pipeline': [(1.0, 0.2), (2.0, 0.4), (99.0, 1.1)]},
    best=1.5,
    bin_s=5.0,
  )
  root = xml.etree.ElementTree.fromstring(svg)
  texts = [e.text for e in root.iter() if e.tag.endswith('}text')]
  for share in ('1.1%', '22.2%', '96.7%'):
    assert f'{share} computing' in texts
  assert '0.5 updates/s, 1,234 tokens/s' in texts
  assert any('1.5 at best' in text for text in texts)
  lines = [e for e in root.iter() if e.tag.endswith('}polyline')]
  # The first two points of the pipeline share a bin.
  assert [len(line.get('points').split()) for line in lines] == [2, 2, 2]
