"""What a task is worth: the bounds, and the binary that prints them."""

import re
import subprocess
import sys

import numpy as np
import pytest

from tunix_reverb.environments import bounds
from tunix_reverb.environments import check
from tunix_reverb.environments import factory
from tunix_reverb.environments import turn_factory
from tunix_reverb.environments.tools import statistics
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import tool_environment
from tunix_reverb.text import characters


def _bounds(name):
  tools = statistics.ToolStatistics()
  options = turn_factory.TurnOptions(on_episode=tools.add)
  environment = factory.load(name, seed=0, turn_options=options)
  report = check.check(environment, num_steps=600, seed=0)
  return report, bounds.describe(environment, report, tools)


@pytest.mark.parametrize('name', ['lookup', 'copy', 'reverse', 'calculator'])
def test_random_and_scripted_policies_bound_a_task(name):
  report, lines = _bounds(f'tool:{name}')
  assert report.violations == []
  assert np.mean(report.returns) < 0.15
  scripted = [line for line in lines if 'return of the scripted' in line]
  assert len(scripted) == 1
  assert scripted[0].startswith('return of the scripted policy: mean 1.')
  assert lines[-1].startswith('  terminated after ')


def test_an_episode_is_printed():
  _, lines = _bounds('tool:lookup')
  texts = [line.strip() for line in lines]
  episode = texts[texts.index('an episode of it:') + 1 :]
  roles = [text.partition(':')[0] for text in episode[:-1]]
  assert roles == ['system', 'user', 'assistant', 'tool', 'assistant']


def test_a_task_without_scripted_policy_is_told():
  report, lines = _bounds('tool:latency/0')
  assert report.violations == []
  # Each turn waits; some of the random ones call a tool that is not there.
  assert re.match(r'59\d calls of tools; errors: \d+ parser$', lines[0])
  assert lines[1].startswith('a call took ')
  assert lines[2:] == [
    'the task has no scripted policy: its upper bound is not known'
  ]


def test_what_goes_wrong_is_counted_by_kind():
  _, lines = _bounds('tool:copy')
  assert re.match(r'\d+ calls of tools; errors: \d+ parser$', lines[0])


def test_other_environments_have_no_bounds():
  assert _bounds('catch')[1] == []


class _Worthless(task.FunctionTask):
  character_limits = task.Limits(max_turn_tokens=2, max_tokens=8)


def test_a_task_that_cannot_be_learnt_is_a_violation():
  def start(generator):
    del generator
    return task.Instance(
      messages=[{'role': 'user', 'content': '1'}],
      score=lambda episode: 0.5,
      oracle=lambda episode: '1',
    )

  environment = tool_environment.make(
    _Worthless(start), chat_format=characters.CharacterFormat(), seed=0
  )
  report = check.check(environment, num_steps=50, seed=0)
  bounds.describe(environment, report, statistics.ToolStatistics())
  assert report.violations == [
    'the scripted policy (0.500) must earn more than the random one (0.500)'
  ]


def test_what_would_be_stored_is_tokens():
  lines = check.describe_columns(factory.environment_spec('tool:lookup'))
  text = '\n'.join(lines)
  assert 'turn_id' in text
  assert lines[-1].startswith('in all 23 bytes per transition')


def test_the_binary_prints_both_bounds(subprocess_env, tmp_path):
  result = subprocess.run(
    [
      sys.executable,
      '-m',
      'launch.check_environment',
      '--environment=tool:lookup',
      '--num_steps=200',
    ],
    env=subprocess_env,
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert result.returncode == 0, result.stderr
  assert 'return of the random policy: mean 0.0' in result.stdout
  assert 'return of the scripted policy: mean 1.100' in result.stdout
  assert 'ok: every timestep agrees' in result.stdout
  assert result.stderr == ''
