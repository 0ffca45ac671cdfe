"""The binary that plans: what it prints, and its exit status."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def _run(subprocess_env, tmp_path, *flags):
  return subprocess.run(
    [sys.executable, '-P', '-m', 'launch.plan', *flags],
    env=subprocess_env,
    cwd=tmp_path,
    text=True,
    capture_output=True,
    timeout=100,
  )


def _total_gib(line):
  return float(line.split(':')[-1].split(' of ')[0].split()[-2])


@pytest.mark.parametrize(
  'topology,chips', [('v5p-256', '128 devices'), ('v5e-256', '256 devices')]
)
def test_70_billion_params_fit_at_8192_tokens(
  topology, chips, subprocess_env, tmp_path
):
  result = _run(
    subprocess_env, tmp_path, '--model=llama3-70b', f'--topology={topology}'
  )
  assert result.returncode == 0, result.stderr + result.stdout
  assert f'on {topology}: {chips}' in result.stdout
  assert 'rows of 8192 = ' in result.stdout
  assert '\nfits: ' in result.stdout
  for part in ('optimiser state', 'all-gather', 'FLOPs', 'MFU', 'compiled'):
    assert part in result.stdout


def test_what_does_not_fit_says_what_does(subprocess_env, tmp_path):
  result = _run(
    subprocess_env, tmp_path, '--model=llama3-70b', '--topology=v5e-16'
  )
  assert result.returncode == 1, result.stderr + result.stdout
  _, _, told = result.stdout.partition('\ndoes not fit: ')
  verdict, heading, *changes = told.splitlines()
  assert 'params and optimiser state alone are 49.30 GiB' in verdict
  assert heading.startswith('what makes it fit')
  # No setting saves it, so the next topology of the chip does.
  (change,) = changes
  assert change.startswith('  --topology=v5e-128 --data_axis=')
  assert _total_gib(change) < 15.75


@pytest.mark.parametrize(
  'flags,message',
  [
    (['--topology=v9-16'], "topology ('v9-16') must be a kind of chip"),
    (['--model=gpt'], 'flag --model=gpt'),
    (['--tensor_axes=2'], 'did you mean --tensor_axis'),
    (['--tensor_axis=3'], 'error: llama3-70b on v5p-256: '),
    (['--topology=cpu-8', '--compiler=tpu'], 'compiles for TPUs; for cpu-8'),
  ],
)
def test_a_mistake_is_one_line_and_status_2(
  flags, message, subprocess_env, tmp_path
):
  result = _run(subprocess_env, tmp_path, *flags)
  assert result.returncode == 2, result.stderr
  assert message in result.stderr
  assert len(result.stderr.splitlines()) == 1
  assert not result.stdout
