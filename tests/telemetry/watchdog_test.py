"""Expiry says who waits on whom; progress and pauses keep it from expiring."""

import subprocess
import sys
import threading
import time

import pytest

from tunix_reverb.telemetry import watchdog as watchdog_lib


@pytest.fixture
def make():
  """Makes watchdogs that collect their line instead of exiting."""
  made = []

  def _make(timeout_s):
    expired, lines = threading.Event(), []

    def on_expire(line):
      lines.append(line)
      expired.set()

    watchdog = watchdog_lib.Watchdog(
      timeout_s, role='actor_0', on_expire=on_expire
    )
    watchdog.start()
    made.append(watchdog)
    return watchdog, expired, lines

  yield _make
  for watchdog in made:
    watchdog.close()


def test_expiry_names_the_waits_longest_first(make):
  watchdog, expired, lines = make(0.5)
  with watchdog.waiting('actor_0 waits for variables of localhost:1'):
    with watchdog.waiting('writer waits for room'):
      assert expired.wait(10)
  (line,) = lines
  assert line.startswith('error: actor_0: no progress for 0.')
  assert line.index('variables of localhost:1') < line.index('writer waits')
  assert '\n' not in line


def test_a_wait_that_ended_is_not_named(make):
  watchdog, expired, lines = make(0.3)
  with watchdog.waiting('old wait'):
    pass
  assert expired.wait(10)
  assert 'old wait' not in lines[0]
  assert 'watchdog_test' in lines[0] or 'threading' in lines[0]


def test_progress_keeps_it_quiet(make):
  watchdog, expired, _ = make(1.0)
  end_s = time.monotonic() + 2.0
  while time.monotonic() < end_s:
    watchdog.progress()
    time.sleep(0.02)
  assert not expired.is_set()


def test_closed_or_never_started_it_does_not_expire(make):
  watchdog, expired, _ = make(0.2)
  watchdog.close()
  watchdog_lib.Watchdog(0.0, role='idle', on_expire=lambda _: expired.set())
  assert not expired.wait(0.6)


def test_a_wait_describes_itself_from_another_thread(make):
  watchdog, _, _ = make(60.0)
  inside, leave = threading.Event(), threading.Event()

  def wait():
    with watchdog.waiting('publisher waits for localhost:2'):
      inside.set()
      leave.wait(10)

  thread = threading.Thread(target=wait)
  thread.start()
  assert inside.wait(10)
  assert 'publisher waits for localhost:2 (for ' in watchdog.describe_waits()
  leave.set()
  thread.join()
  assert watchdog.describe_waits() == ''


_PROGRAM = """
import time
from tunix_reverb.telemetry import watchdog
w = watchdog.Watchdog(0.3, role='learner')
w.start()
with w.waiting('learner waits for items of table trajectories at localhost:1'):
  time.sleep(60)
"""


@pytest.mark.integration
def test_by_default_the_process_ends_with_status_3_and_one_line(subprocess_env):
  result = subprocess.run(
    [sys.executable, '-c', _PROGRAM],
    env=subprocess_env,
    text=True,
    capture_output=True,
    timeout=30,
  )
  assert result.returncode == watchdog_lib.EXIT_STATUS == 3
  assert 'items of table trajectories at localhost:1' in result.stderr
  assert result.stderr.count('\n') == 1


_STOPPED = """
import os, signal, subprocess, sys, time
from tunix_reverb.telemetry import watchdog
w = watchdog.Watchdog(4.0, role='learner')
w.start()
subprocess.Popen(['sh', '-c', f'sleep 6; kill -CONT {os.getpid()}'])
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1.5)
print('still here')
"""


@pytest.mark.integration
def test_a_suspended_process_does_not_expire_when_it_wakes(subprocess_env):
  result = subprocess.run(
    [sys.executable, '-c', _STOPPED],
    env=subprocess_env,
    text=True,
    capture_output=True,
    timeout=60,
  )
  assert (result.returncode, result.stdout) == (0, 'still here\n')
