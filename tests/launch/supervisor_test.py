"""The supervisor on real child processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from launch import supervisor as supervisor_lib

pytestmark = pytest.mark.integration

_SLEEP = 'import time; print("up", flush=True); time.sleep(60)'
_DEAF = (
  'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); ' + _SLEEP
)
_FAST = supervisor_lib.BackOff(first_s=0.1, longest_s=0.3, healthy_s=1.0)


def _spec(name, code, **kwargs):
  return supervisor_lib.ProcessSpec(
    name=name, command=[sys.executable, '-S', '-c', code], **kwargs
  )


@pytest.fixture
def supervise(tmp_path):
  """Makes started supervisors; whatever still runs is killed at the end."""
  made = []

  def _make(*specs, back_off=_FAST):
    said = []
    supervisor = supervisor_lib.Supervisor(
      specs, log_dir=tmp_path, say=said.append, back_off=back_off
    )
    supervisor.start()
    made.append(supervisor)
    return supervisor, said

  yield _make
  for supervisor in made:
    supervisor.stop(0.0)


def _poll_until(supervisor, condition, timeout_s=20.0):
  deadline_s = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline_s, 'the condition must come true'
    supervisor.poll()
    time.sleep(0.01)


def _wait_for_log(path, text, timeout_s=20.0):
  deadline_s = time.monotonic() + timeout_s
  while not path.exists() or text not in path.read_text():
    assert time.monotonic() < deadline_s, f'{path} must say {text!r}'
    time.sleep(0.01)


def _pids(supervisor):
  return {s.name: s.pid for s in supervisor.statuses()}


def _alive(pid):
  try:
    with open(f'/proc/{pid}/stat') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except FileNotFoundError:
    return False


def _wait_gone(pids, timeout_s=10.0):
  deadline_s = time.monotonic() + timeout_s
  while any(_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
    time.sleep(0.02)
  return [pid for pid in pids if _alive(pid)]


def test_a_killed_actor_is_restarted_and_the_rest_goes_on(supervise):
  supervisor, said = supervise(
    _spec('learner', _SLEEP), _spec('actor_0', _SLEEP, restart=True)
  )
  before = _pids(supervisor)
  os.kill(before['actor_0'], signal.SIGKILL)
  _poll_until(supervisor, lambda: supervisor.restarts() == {'actor_0': 1})
  after = _pids(supervisor)
  assert after['learner'] == before['learner']
  assert after['actor_0'] not in (0, before['actor_0'])
  assert said == ['actor_0 died (killed by SIGKILL); restart in 0.1 s']
  assert supervisor.outcome is None


def test_back_off_doubles_up_to_its_limit_and_then_gives_up(
  supervise, tmp_path
):
  supervisor, said = supervise(
    _spec('actor_0', 'print("no luck"); raise SystemExit(1)', restart=True)
  )
  _poll_until(supervisor, lambda: supervisor.outcome is not None)
  delays = [line.rpartition('restart in ')[2] for line in said]
  assert delays == ['0.1 s', '0.2 s', '0.3 s', '0.3 s']
  assert supervisor.outcome.failed
  assert 'died 5 times in a row' in supervisor.outcome.reason
  assert supervisor.outcome.detail.endswith('no luck')
  assert supervisor.outcome.detail.count('no luck') == 1
  assert (tmp_path / 'actor_0.log').read_text().count('no luck') == 5


def test_progress_starts_the_count_of_deaths_over(supervise):
  supervisor, said = supervise(
    _spec('actor_0', 'raise SystemExit(1)', restart=True)
  )

  def many_deaths():
    supervisor.note_progress('actor_0')
    return len(said) >= 7

  _poll_until(supervisor, many_deaths)
  assert supervisor.outcome is None


def test_a_long_life_starts_the_delay_over(supervise):
  code = 'import time; time.sleep(0.3); raise SystemExit(1)'
  back_off = supervisor_lib.BackOff(first_s=0.05, longest_s=9, healthy_s=0.1)
  supervisor, said = supervise(
    _spec('actor_0', code, restart=True), back_off=back_off
  )
  _poll_until(supervisor, lambda: len(said) >= 6)
  assert {line.rpartition('restart in ')[2] for line in said} == {'0.05 s'}


def test_a_group_dies_and_is_restarted_together(supervise):
  supervisor, said = supervise(
    _spec('learner', _DEAF, restart=True, group='learner'),
    _spec('learner_1', _DEAF, restart=True, group='learner'),
    _spec('actor_0', _SLEEP, restart=True),
  )
  before = [s.pid for s in supervisor.statuses()]
  os.kill(before[1], signal.SIGKILL)
  _poll_until(supervisor, lambda: supervisor.statuses()[1].restarts == 1)
  after = [s.pid for s in supervisor.statuses()]
  assert [a == b for a, b in zip(after, before)] == [False, False, True]
  assert supervisor.restarts() == {'learner': 1, 'learner_1': 1}
  assert said == [
    'learner_1 died (killed by SIGKILL); restart of group learner in 0.1 s'
  ]


def test_a_group_that_dies_again_and_again_is_given_up(supervise):
  supervisor, said = supervise(
    _spec('learner', _SLEEP, restart=True, group='learner'),
    _spec('learner_1', 'raise SystemExit(1)', restart=True, group='learner'),
  )
  _poll_until(supervisor, lambda: supervisor.outcome)
  assert supervisor.outcome.failed
  assert 'learner_1 died 5 times in a row' in supervisor.outcome.reason
  assert len(said) == 4


def test_a_users_mistake_is_not_retried(supervise):
  code = 'import sys; print("error: bad flag"); sys.exit(2)'
  supervisor, said = supervise(_spec('actor_0', code, restart=True))
  _poll_until(supervisor, lambda: supervisor.outcome is not None)
  assert not said
  assert supervisor.outcome.reason == 'actor_0 ended (status 2): bad flag'
  assert 'error: bad flag' in supervisor.outcome.detail


def test_a_restart_may_have_a_command_of_its_own(supervise, tmp_path):
  again = [sys.executable, '-S', '-c', _SLEEP.replace('up', 'again')]
  supervisor, _ = supervise(
    _spec('replay_server_0', _SLEEP, restart=True, restart_command=again)
  )
  log = tmp_path / 'replay_server_0.log'
  for _ in range(2):
    _wait_for_log(log, 'up')
    os.kill(_pids(supervisor)['replay_server_0'], signal.SIGKILL)
    _poll_until(
      supervisor, lambda: supervisor.statuses()[0].state == 'waiting to restart'
    )
    _poll_until(supervisor, lambda: supervisor.statuses()[0].state == 'running')
  _wait_for_log(log, 'again')
  assert log.read_text().count('up') == 1


@pytest.mark.parametrize('saves', [True, False])
def test_a_failure_to_save_at_the_end_is_told(supervise, tmp_path, saves):
  code = (
    'import signal, sys, time\n'
    'def end(*_):\n'
    '  print("error: no space", flush=True)\n'
    '  sys.exit(1)\n'
    'signal.signal(signal.SIGTERM, end)\n'
    'print("up", flush=True)\n'
    'time.sleep(60)\n'
  )
  supervisor, _ = supervise(
    _spec('replay_server_0', code, restart=True, saves=saves)
  )
  _wait_for_log(tmp_path / 'replay_server_0.log', 'up')
  told = ['replay_server_0 ended (status 1): no space'] if saves else []
  assert supervisor.stop(10.0) == told


def test_the_death_of_the_learner_is_the_outcome(supervise):
  supervisor, _ = supervise(
    _spec('learner', _SLEEP, completes=True), _spec('actor_0', _SLEEP)
  )
  os.kill(_pids(supervisor)['learner'], signal.SIGKILL)
  _poll_until(supervisor, lambda: supervisor.outcome is not None)
  assert supervisor.outcome.failed
  assert supervisor.outcome.reason == 'learner ended (killed by SIGKILL)'


def test_a_learner_that_completes_ends_the_run_in_order(supervise):
  supervisor, _ = supervise(_spec('learner', '', completes=True))
  _poll_until(supervisor, lambda: supervisor.outcome is not None)
  assert supervisor.outcome == supervisor_lib.Outcome(
    False, 'learner completed', completed=True
  )


def test_a_server_that_ends_by_itself_is_a_failure(supervise):
  supervisor, _ = supervise(_spec('replay_server_0', ''))
  _poll_until(supervisor, lambda: supervisor.outcome is not None)
  assert supervisor.outcome.failed


def test_stop_tells_the_server_only_after_the_others_have_ended(
  supervise, tmp_path
):
  code = (
    'import signal, sys, time\n'
    'def end(*_):\n'
    '  time.sleep({delay}); print("ended", time.time(), flush=True)\n'
    '  sys.exit(0)\n'
    'signal.signal(signal.SIGTERM, end)\n'
    'print("up", flush=True)\n'
    'time.sleep(60)\n'
  )
  supervisor, _ = supervise(
    _spec('replay_server_0', code.format(delay=0), stop_last=True),
    _spec('learner', code.format(delay=0.5)),
  )
  for name in ('replay_server_0', 'learner'):
    _wait_for_log(tmp_path / f'{name}.log', 'up')
  assert supervisor.stop(10.0) == []
  ended = {
    name: float((tmp_path / f'{name}.log').read_text().split()[-1])
    for name in ('replay_server_0', 'learner')
  }
  assert ended['learner'] < ended['replay_server_0']


def test_stop_kills_what_ignores_sigterm_at_the_deadline(supervise, tmp_path):
  supervisor, said = supervise(
    _spec('actor_0', _DEAF), _spec('replay_server_0', _SLEEP, stop_last=True)
  )
  for name in ('actor_0', 'replay_server_0'):
    _wait_for_log(tmp_path / f'{name}.log', 'up')
  pids = _pids(supervisor)
  start_s = time.monotonic()
  (trouble,) = supervisor.stop(1.0)
  assert 'actor_0' in trouble and 'was killed' in trouble
  assert time.monotonic() - start_s < 2.0
  assert said == [
    f'actor_0 (pid {pids["actor_0"]}) did not end within 1 s and was killed'
  ]
  assert not [pid for pid in pids.values() if _alive(pid)]


def test_children_of_a_role_end_with_it(supervise, tmp_path):
  code = (
    'import subprocess, sys, time\n'
    'child = subprocess.Popen([sys.executable, "-S", "-c", '
    '"import time; time.sleep(60)"])\n'
    'print("child", child.pid, flush=True)\n'
    'time.sleep(60)\n'
  )
  supervisor, _ = supervise(_spec('actor_0', code, restart=True))
  log = tmp_path / 'actor_0.log'
  _wait_for_log(log, 'child')
  child = int(log.read_text().split()[-1])
  os.kill(_pids(supervisor)['actor_0'], signal.SIGKILL)
  _poll_until(supervisor, supervisor.restarts)
  assert not _wait_gone([child])


# What every role does first when it is supervised.
_TIED = (
  'import os, time\n'
  'from launch import shutdown\n'
  'shutdown.die_with_parent(int(os.environ[shutdown.PARENT_PID]))\n'
  'time.sleep(60)'
)
_SUPERVISOR = f"""
import sys, time
from launch import supervisor
s = supervisor.Supervisor(
    [supervisor.ProcessSpec(
        name=f'actor_{{i}}', command=[sys.executable, '-c', {_TIED!r}])
     for i in range(2)],
    log_dir=sys.argv[1])
s.start()
print(*(status.pid for status in s.statuses()), flush=True)
time.sleep(60)
"""


def test_no_child_survives_kill_9_of_the_supervisor(subprocess_env, tmp_path):
  process = subprocess.Popen(
    [sys.executable, '-c', _SUPERVISOR, str(tmp_path)],
    env=subprocess_env,
    cwd=tmp_path,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and all(_alive(pid) for pid in pids)
  finally:
    process.kill()
    process.communicate()
  assert not _wait_gone(pids)


@pytest.mark.parametrize(
  ('status', 'completed', 'reason'),
  [(0, True, 'learner completed'), (4, False, 'was told to stop by a signal')],
)
def test_completing_is_told_from_being_told_to_stop(
  supervise, status, completed, reason
):
  learner = _spec('learner', f'import os; os._exit({status})', completes=True)
  supervisor, _ = supervise(learner)
  _poll_until(supervisor, lambda: supervisor.outcome is not None)
  assert not supervisor.outcome.failed
  assert supervisor.outcome.completed == completed
  assert reason in supervisor.outcome.reason
