"""The frame of the binaries, on real processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.integration

_ROLE = """
import os, sys, threading, time
from launch import app
from launch import flags
from tunix_reverb import errors

def role(context):
  print('ready', flush=True)
  {body}

app.run(role, role='learner', stop_deadline_s={deadline})
"""


@pytest.fixture
def start(subprocess_env, tmp_path):
  """Starts a role with the given body; what is left of it is killed."""
  started = []

  def _start(body, *args, deadline=9.0):
    code = _ROLE.format(body=body.replace('\n', '\n  '), deadline=deadline)
    process = subprocess.Popen(
      [sys.executable, '-c', code, *args],
      env=subprocess_env,
      cwd=tmp_path,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
    )
    started.append(process)
    return process

  yield _start
  for process in started:
    process.kill()
    process.communicate()


def _ready(process):
  assert process.stdout.readline() == 'ready\n', process.stderr.read()


def _finish(process, timeout_s=15):
  out, err = process.communicate(timeout=timeout_s)
  return process.returncode, out, err


@pytest.mark.parametrize(
  ('body', 'status'),
  [('return 0', 0), ('return None', 0), ('return 7', 7), ('sys.exit(5)', 5)],
)
def test_the_status_is_what_main_returns(start, body, status):
  assert _finish(start(body))[0] == status


def test_a_users_mistake_is_one_line_and_status_2(start):
  status, _, err = _finish(start("raise errors.UserError('seed (1) must x')"))
  assert (status, err) == (2, 'error: seed (1) must x\n')


def test_another_exception_shows_its_traceback(start):
  status, _, err = _finish(start("raise RuntimeError('broken')"))
  assert status == 1
  assert 'Traceback' in err and 'RuntimeError: broken' in err


def test_an_exception_in_a_thread_ends_the_process(start):
  process = start(
    'def fail():\n  raise KeyError("lost")\n'
    'threading.Thread(target=fail, name="feed").start()\n'
    'time.sleep(60)'
  )
  status, _, err = _finish(process)
  assert status == 1
  assert "thread 'feed' failed" in err and "KeyError: 'lost'" in err


@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_stop_and_main_ends_in_order(start, signum):
  process = start('context.stop.wait(30)\nprint("closed")\nreturn 0')
  _ready(process)
  process.send_signal(signum)
  status, out, err = _finish(process)
  assert (status, out, err) == (0, 'closed\n', '')


def test_what_ignores_stop_is_ended_at_the_deadline_with_a_line(start):
  process = start(
    'context.watchdog.progress()\n'
    'with context.watchdog.waiting("learner waits for items"):\n'
    '  time.sleep(60)',
    deadline=0.5,
  )
  _ready(process)
  start_s = time.monotonic()
  process.terminate()
  status, _, err = _finish(process)
  assert status == 1
  assert time.monotonic() - start_s < 3.0
  assert 'learner waits for items (for' in err and err.count('\n') == 1


def test_a_role_that_is_still_starting_ends_sooner(start):
  process = start('time.sleep(60)')
  _ready(process)
  start_s = time.monotonic()
  process.terminate()
  status, out, _ = _finish(process)
  assert status == 0
  assert time.monotonic() - start_s < 5.0
  assert 'stopped while starting' in out


def test_code_that_holds_the_gil_is_ended_too(start):
  # PyDLL keeps the GIL: no Python thread runs while it sleeps.
  process = start(
    'import ctypes\n'
    'threading.Timer(0.3, lambda: os.kill(os.getpid(), 15)).start()\n'
    'time.sleep(0.5)\n'
    'ctypes.PyDLL(None).sleep(60)',
    deadline=1.0,
  )
  _ready(process)
  start_s = time.monotonic()
  assert _finish(process)[0] != 0
  assert time.monotonic() - start_s < 5.0


def test_a_second_signal_ends_at_once_but_an_echo_does_not(start):
  process = start('context.watchdog.progress()\ntime.sleep(60)')
  _ready(process)
  process.terminate()
  process.terminate()
  time.sleep(1.3)
  assert process.poll() is None
  process.terminate()
  assert _finish(process, timeout_s=3)[0] == 128 + signal.SIGTERM


def test_non_daemon_threads_do_not_hold_up_the_exit(start):
  process = start(
    'threading.Thread(target=time.sleep, args=(60,)).start()\nreturn 0'
  )
  assert _finish(process, timeout_s=10)[0] == 0


def test_the_watchdog_ends_a_role_without_progress(start):
  process = start(
    'with context.watchdog.waiting("learner waits for localhost:1"):\n'
    '  time.sleep(60)',
    '--watchdog_s=0.5',
  )
  status, _, err = _finish(process)
  assert status == 3
  assert 'no progress' in err and 'learner waits for localhost:1' in err


def test_a_supervised_role_and_its_children_end_with_its_parent(
  start, subprocess_env, tmp_path
):
  code = _ROLE.format(
    body='import subprocess\n'
    '  child = subprocess.Popen(["sleep", "60"])\n'
    '  print(os.getpid(), child.pid, flush=True)\n'
    '  context.stop.wait(60)',
    deadline=9.0,
  )
  parent = subprocess.Popen(
    [
      sys.executable,
      '-c',
      'import subprocess, sys\n'
      'subprocess.Popen([sys.executable, "-c", sys.argv[1], "--supervised"], '
      'process_group=0).wait()',
      code,
    ],
    env=subprocess_env,
    cwd=tmp_path,
    text=True,
    stdout=subprocess.PIPE,
  )
  try:
    _ready(parent)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
  finally:
    parent.kill()
    parent.wait()
  deadline_s = time.monotonic() + 5
  while any(_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
    time.sleep(0.02)
  parent.stdout.close()
  assert not [pid for pid in pids if _alive(pid)]


def _alive(pid):
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def test_the_environment_is_set_before_main(start):
  process = start(
    'print(os.environ["no_proxy"], os.environ["TF_CPP_MIN_LOG_LEVEL"])\n'
    'assert "jax" not in sys.modules and "tensorflow" not in sys.modules\n'
    'assert "numpy" not in sys.modules'
  )
  status, out, err = _finish(process)
  assert status == 0, err
  assert 'localhost' in out and out.split()[-1] == '3'


def test_config_and_run_dir_reach_the_role(start, tmp_path):
  process = start(
    'print(context.config.seed, context.run_dir, context.role)\n'
    'context.logger.write({"loss": 1.5}, 1)',
    '--seed=9',
    f'--run_dir={tmp_path}',
  )
  status, out, _ = _finish(process)
  assert status == 0
  assert out.splitlines()[-1] == f'9 {tmp_path} learner'
  assert os.path.getsize(tmp_path / 'metrics' / 'learner.jsonl') > 0
