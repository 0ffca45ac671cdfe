"""The binaries as their user runs them: `python -m launch.<role>` in tmp_path.

Every start costs seconds of CPU (TensorFlow, JAX), so each test here is one
scenario that asks many things of few runs.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from launch import topology

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import binaries


def _command(name, flags, server_python) -> list[str]:
  """How the user of this lane starts `launch.<name>`."""
  command = [sys.executable, '-m', f'launch.{name}', *flags]
  if binaries.HAS_REVERB or name == 'check_environment':
    return command
  if name == 'replay_server':
    return [server_python(), *command[1:]]
  if name == 'local':
    command.append(f'--replay_server_python={server_python()}')
  return command


@pytest.fixture
def start(subprocess_env, tmp_path, request):
  """Starts `launch.<name>` with flags; kills what is left after the test."""
  started = []
  server_python = lambda: request.getfixturevalue('server_python')

  def _start(name, *flags, env=None, command=None) -> binaries.Process:
    directory = tmp_path / f'process_{len(started)}'
    directory.mkdir()
    with (
      (directory / 'out').open('w') as out,
      (directory / 'err').open('w') as err,
    ):
      popen = subprocess.Popen(
        command or _command(name, flags, server_python),
        env=subprocess_env | (env or {}),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
      )
    started.append(binaries.Process(popen, directory))
    return started[-1]

  yield _start
  for process in started:
    process.kill_all()


@pytest.fixture
def refused(start):
  """Starts a binary that must refuse; returns its one line on stderr."""

  def _refused(name, *flags, status=2, env=None, timeout_s=60) -> str:
    process = start(name, *flags, env=env)
    assert process.wait(timeout_s) == status, process.out + process.err
    lines = process.err.splitlines()
    assert len(lines) == 1, process.err
    assert lines[0].startswith('error: ')
    return lines[0]

  return _refused


@pytest.fixture
def port():
  """A TCP port that was free a moment ago."""
  return topology.pick_free_ports(1)[0]


@pytest.fixture
def small_disk(tmp_path):
  """A directory on a file system of 1 MiB of its own."""
  directory = tmp_path / 'small_disk'
  directory.mkdir()
  mount = subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(directory)],
    capture_output=True,
    text=True,
    check=False,
  )
  if mount.returncode:
    pytest.skip(f'no small file system can be mounted: {mount.stderr.strip()}')
  yield directory
  subprocess.run(['umount', '-l', str(directory)], check=True)
