"""The checker, and its binary."""

import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

fakes = pytest.importorskip('fakes', reason='gymnasium is missing')

from tunix_reverb.environments import check  # noqa: E402
from tunix_reverb.environments import factory  # noqa: E402


def test_an_environment_that_keeps_its_contract():
  report = check.check(fakes.Counter(length=3), num_steps=40, seed=0)
  assert report.violations == []
  assert report.num_steps == 40
  assert report.lengths == [3] * 10
  assert report.returns == [6.0] * 10
  assert report.num_truncations == 0
  assert report.steps_per_s > 0


def test_truncations_are_counted():
  report = check.check(fakes.Counter(last_discount=1.0), num_steps=40, seed=0)
  assert report.num_truncations == 10


@pytest.mark.parametrize(
  'text',
  [
    r'observation must have shape \(2,\), not \(3,\) \(first at step 2, 3 in',
    r'observation must not be above its maximum 100.0',
    r'reward must be finite, not nan',
    r'discount \(1.5\) must be between 0 and 1',
    r'reward of FIRST must be None',
    r'observation_spec must not change between episodes',
    r'observation must be float64, not float32',
  ],
)
def test_each_violation_is_one_line(text):
  report = check.check(fakes.Wrong(), num_steps=40, seed=0)
  assert len([v for v in report.violations if _matches(text, v)]) == 1
  assert all('\n' not in v for v in report.violations)


def _matches(pattern, text):
  return re.search(pattern, text)


def test_an_exception_is_a_violation_with_its_place():
  report = check.check(fakes.Raising(at=3), num_steps=40, seed=0)
  assert len(report.violations) == 1
  assert 'raised RuntimeError: broken on purpose' in report.violations[0]
  assert 'fakes.py, line' in report.violations[0]
  assert 'at step 3' in report.violations[0]


def test_an_environment_that_never_resets_is_found():
  class NeverResets(fakes.Counter):
    def step(self, action):
      return super().step(action)._replace(step_type=fakes.dm_env.StepType.MID)

  violations = check.check(NeverResets(), num_steps=3, seed=0).violations
  assert any('after LAST must return FIRST' in v for v in violations)


def test_sampled_actions_fit_their_spec():
  generator = np.random.default_rng(0)
  for name in ('catch', 'gym:Pendulum-v1', 'gym:CartPole-v1'):
    spec = factory.environment_spec(name).action
    for _ in range(20):
      spec.validate(check.sample_action(spec, generator))
    batch = check.sample_action(spec, generator, 5)
    assert (batch.shape, batch.dtype) == ((5, *spec.shape), spec.dtype)


def test_what_would_be_stored():
  lines = check.describe_columns(factory.environment_spec('catch'))
  text = '\n'.join(lines)
  assert 'observation' in text
  assert '200 bytes per transition' in text
  assert lines[-1].startswith('in all 218 bytes per transition')


def _run(env, cwd, *flags):
  return subprocess.run(
    [sys.executable, '-m', 'launch.check_environment', *flags],
    env=env,
    cwd=cwd,
    capture_output=True,
    text=True,
    timeout=60,
  )


def test_the_binary_says_ok(subprocess_env, tmp_path):
  result = _run(
    subprocess_env,
    tmp_path,
    '--environment=dm_control:cartpole/balance',
    '--num_steps=50',
  )
  assert result.returncode == 0, result.stderr
  assert 'ok: every timestep agrees' in result.stdout
  assert 'observation/position' in result.stdout
  assert result.stderr == ''


def test_the_binary_lists_violations_of_a_users_own(subprocess_env, tmp_path):
  source = pathlib.Path(fakes.__file__).read_text(encoding='utf-8')
  (tmp_path / 'mine.py').write_text(source)  # Found in the working directory.
  result = _run(subprocess_env, tmp_path, '--environment=mine:make_wrong')
  assert result.returncode == 1, result.stderr
  assert 'violations' in result.stdout
  assert 'reward must be finite' in result.stdout


@pytest.mark.parametrize(
  ('flag', 'text'),
  [
    ('--environment=cath', 'did you mean catch'),
    ('--num_step=3', 'did you mean --num_steps'),
    ('--num_steps=0', 'num_steps'),
    ('stray', 'unexpected argument'),
  ],
)
def test_the_binary_tells_mistakes_in_one_line(
  flag, text, subprocess_env, tmp_path
):
  result = _run(subprocess_env, tmp_path, flag)
  assert result.returncode == 2
  assert text in result.stderr
  assert 'Traceback' not in result.stderr


@pytest.mark.parametrize('flag', ['--help', '--nonsense'])
def test_flags_are_answered_at_once(flag, subprocess_env, tmp_path):
  start = time.monotonic()
  _run(subprocess_env, tmp_path, flag)
  assert time.monotonic() - start < 2.0
