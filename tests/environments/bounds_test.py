"""What a task is worth: the bounds, and the binary that prints them."""

import subprocess
import sys

import numpy as np
import pytest

from tunix_reverb.environments import bounds
from tunix_reverb.environments import check
from tunix_reverb.environments import factory
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import tool_environment
from tunix_reverb.text import characters


def _bounds(name):
  environment = factory.make(name, seed=0)
  report = check.check(environment, num_steps=600, seed=0)
  return report, bounds.describe_oracle(environment, report)


@pytest.mark.parametrize('name', ['lookup', 'copy', 'reverse', 'calculator'])
def test_random_and_scripted_policies_bound_a_task(name):
  report, lines = _bounds(f'tool:{name}')
  assert report.violations == []
  assert np.mean(report.returns) < 0.15
  assert lines[0].startswith('return of the scripted policy: mean 1.')
  assert lines[-1].startswith('  terminated after ')


def test_an_episode_is_printed():
  _, lines = _bounds('tool:lookup')
  texts = [line.strip() for line in lines]
  roles = [text.partition(':')[0] for text in texts[2:-1]]
  assert roles == ['system', 'user', 'assistant', 'tool', 'assistant']


def test_a_task_without_scripted_policy_is_told():
  report, lines = _bounds('tool:latency/0')
  assert report.violations == []
  assert lines == [
    'the task has no scripted policy: its upper bound is not known'
  ]


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
  bounds.describe_oracle(environment, report)
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
