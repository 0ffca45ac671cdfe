"""The interpreter of each role, checked by running it."""

import importlib.util
import json
import subprocess
import sys

import pytest

from launch import interpreters
import tunix_reverb
from tunix_reverb import errors

pytestmark = pytest.mark.integration

_FACTS = {'python': '3.12.1', 'version': tunix_reverb.__version__}


@pytest.fixture
def make_python(tmp_path):
  """Writes a program that answers as an interpreter of another lane would."""

  def _make(name, *, script=None, **facts):
    path = tmp_path / name
    script = script or f"echo '{json.dumps({**_FACTS, **facts})}'"
    path.write_text(f'#!/bin/sh\n{script}\n')
    path.chmod(0o755)
    return str(path)

  return _make


def test_a_role_that_is_not_named_runs_on_this_interpreter(make_python):
  server = make_python('reverb', reverb=True)
  commands = interpreters.resolve(
    {'replay_server': server}, replay_client='wire'
  )
  assert commands.keys() == set(interpreters.ROLES)
  assert commands['replay_server'][0] == server
  assert {commands[r][0] for r in ('learner', 'actor', 'evaluator')} == {
    sys.executable
  }


def test_what_this_interpreter_has_is_found_out_by_running_it():
  answer = interpreters._ask(sys.executable)
  assert answer == interpreters._Facts(
    python='.'.join(str(v) for v in sys.version_info[:3]),
    version=tunix_reverb.__version__,
    reverb=importlib.util.find_spec('reverb') is not None,
  )


@pytest.mark.parametrize(
  ('name', 'script', 'words'),
  [
    ('directory/absent', None, 'No such file'),
    ('fails', 'echo "cannot start" >&2; exit 3', 'cannot start'),
    ('silent', 'exit 3', 'status 3'),
    ('garbage', 'echo 12', 'must be a Python interpreter'),
    ('hangs', 'exec sleep 60', 'no answer within'),
  ],
)
def test_what_does_not_run_is_refused(
  make_python, monkeypatch, name, script, words
):
  monkeypatch.setattr(interpreters, '_PROBE_TIMEOUT_S', 1.0)
  python = make_python(name, script=script) if script else name
  named = dict.fromkeys(interpreters.ROLES, make_python('reverb', reverb=True))
  with pytest.raises(errors.UserError) as raised:
    interpreters.resolve({**named, 'actor': python}, replay_client='wire')
  message = str(raised.value)
  assert words in message and '\n' not in message
  assert f'actor_python ({python!r}) must be a Python interpreter' in message


@pytest.mark.parametrize(
  ('version', 'words'), [(None, 'has none'), ('0.0.1', 'has version 0.0.1')]
)
def test_the_package_must_be_there_in_this_version(make_python, version, words):
  python = make_python('other', version=version, reverb=True)
  with pytest.raises(errors.UserError, match=words) as raised:
    interpreters.resolve({'replay_server': python}, replay_client='wire')
  assert f'must have tunix_reverb {tunix_reverb.__version__}' in str(
    raised.value
  )
  assert f'{python} -m pip install' in str(raised.value)


def test_a_server_needs_dm_reverb(make_python):
  python = make_python('modern', reverb=False)
  with pytest.raises(errors.UserError) as raised:
    interpreters.resolve({'replay_server': python}, replay_client='wire')
  assert f'{python!r}, Python 3.12.1) must have dm-reverb' in str(raised.value)
  assert '--replay_server_python=.venv/bin/python' in str(raised.value)


@pytest.mark.parametrize('role', ['learner', 'actor', 'evaluator'])
def test_the_official_client_needs_dm_reverb(make_python, role):
  named = {
    r: make_python(f'reverb_{r}', reverb=True) for r in interpreters.ROLES
  }
  named[role] = make_python('modern', reverb=False)
  interpreters.resolve(named, replay_client='wire')
  with pytest.raises(errors.UserError) as raised:
    interpreters.resolve(named, replay_client='official')
  assert f'{role}_python' in str(raised.value)
  assert '--replay_client=wire' in str(raised.value)


def test_named_interpreters_as_flags():
  named = {'replay_server': 'a b/python', 'actor': 'c'}
  assert interpreters.as_flags(named) == (
    " --replay_server_python='a b/python' --actor_python=c"
  )
  assert interpreters.as_flags({}) == ''


def test_local_refuses_before_it_makes_a_run_directory(
  subprocess_env, tmp_path
):
  result = subprocess.run(
    [
      sys.executable, '-m', 'launch.local', '--run_dir=run',
      '--learner_python=directory/absent',
    ],
    env=subprocess_env,
    cwd=tmp_path,
    text=True,
    capture_output=True,
    timeout=60,
  )  # fmt: skip
  assert result.returncode == 2
  assert result.stderr.startswith('error: ')
  assert result.stderr.count('\n') == 1
  assert not (tmp_path / 'run').exists()
