"""Starts processes, restarts the dead, and stops all of them in time."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import time
from typing import IO

from launch import shutdown
from tunix_reverb.telemetry import run_state

# The exit status of a user's mistake: no restart can mend it.
_USER_ERROR_STATUS = 2
_LOG_TAIL_BYTES = 8192
_LOG_TAIL_LINES = 15
# The share of the stop deadline after which the last processes are told to
# stop even if the first have not ended.
_FIRST_SHARE = 0.6


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSpec:
  """One process to supervise.

  Attributes:
    name: such as `actor_0`; also the name of its log file.
    command: program and arguments.
    restart: whether its death is mended by a restart; if not, it ends the run.
    restart_command: program and arguments of a restart; empty for `command`.
    saves: whether it saves what it holds when told to stop; a failure is told.
    completes: whether its exit with status 0 is the orderly end of the run.
    stop_last: told to stop only when the others have ended.
    group: processes of one group cannot go on without each other: when one
      dies, the rest are killed, and all are restarted together.
  """

  name: str
  command: Sequence[str]
  restart: bool = False
  restart_command: Sequence[str] = ()
  saves: bool = False
  completes: bool = False
  stop_last: bool = False
  group: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackOff:
  """How fast a dead process is restarted, and when to give up.

  Attributes:
    first_s: seconds before the first restart; doubles with each further one.
    longest_s: the longest delay, seconds.
    healthy_s: a process that lived this long starts over at `first_s`.
    max_deaths: deaths in a row without progress that end the run.
  """

  first_s: float = 1.0
  longest_s: float = 30.0
  healthy_s: float = 60.0
  max_deaths: int = 5


@dataclasses.dataclass(frozen=True)
class Outcome:
  """Why the run is over.

  Attributes:
    failed: whether something went wrong.
    reason: one line for the user.
    detail: more lines, such as the end of a log; may be empty.
    completed: whether all the work is done.
    user_error: whether a role told a user's mistake.
  """

  failed: bool
  reason: str
  detail: str = ''
  completed: bool = False
  user_error: bool = False


class _Process:
  """A spec, its running child if any, and its history of deaths."""

  def __init__(self, spec: ProcessSpec):
    self.spec = spec
    self.popen: subprocess.Popen | None = None
    self.starts = 0
    self.started_s = 0.0
    self.restart_at_s: float | None = None
    self.deaths_in_a_row = 0
    self.delay_s = 0.0

  @property
  def running(self) -> bool:
    return self.popen is not None


class Supervisor:
  """Runs a table of processes, each in its own process group, with a log file.

  Poll-driven and without threads: the kernel ties a child to the thread that
  started it, so every method must be called from the main thread. Children get
  SIGTERM when this process dies, however it dies.
  """

  def __init__(
    self,
    specs: Sequence[ProcessSpec],
    *,
    log_dir: pathlib.Path,
    say: Callable[[str], None] = print,
    back_off: BackOff = BackOff(),
    environ: Mapping[str, str] | None = None,
  ):
    """Creates a supervisor; nothing runs before `start`.

    Args:
      specs: what to run.
      log_dir: gets `<name>.log` with stdout and stderr of each.
      say: prints one event, such as a restart, for the user.
      back_off: of restarts.
      environ: added to this process's environment for the children.
    """
    self._processes = [_Process(spec) for spec in specs]
    self._log_dir = pathlib.Path(log_dir)
    self._say = say
    self._back_off = back_off
    # Not `preexec_fn`: it forks, which is not safe beside JAX's threads.
    tie = {shutdown.PARENT_PID: str(os.getpid())}
    self._environ = {**os.environ, **(environ or {}), **tie}
    self.outcome: Outcome | None = None
    self._troubles: list[str] = []

  def start(self) -> None:
    """Starts every process."""
    self._log_dir.mkdir(parents=True, exist_ok=True)
    for process in self._processes:
      self._spawn(process)

  def poll(self) -> Outcome | None:
    """Notices deaths and restarts what is due; returns the outcome, if any."""
    now = time.monotonic()
    for process in self._processes:
      if process.running and self._reap(process):
        self._on_exit(process, now)
      elif process.restart_at_s is not None and process.restart_at_s <= now:
        self._spawn(process)
    return self.outcome

  def note_progress(self, name: str) -> None:
    """Says that the process `name` does useful work, so deaths start over."""
    for process in self._processes:
      if process.spec.name == name:
        process.deaths_in_a_row = 0

  def statuses(self) -> list[run_state.ProcessStatus]:
    """One status per process, in the order of the specs."""
    now = time.monotonic()
    return [
      run_state.ProcessStatus(
        name=process.spec.name,
        pid=process.popen.pid if process.popen else 0,
        restarts=process.starts - 1,
        age_s=now - process.started_s,
        state=_state(process),
      )
      for process in self._processes
    ]

  def restarts(self) -> dict[str, int]:
    """Restarts by process name; only of those restarted."""
    return {s.name: s.restarts for s in self.statuses() if s.restarts > 0}

  def stop(self, deadline_s: float) -> list[str]:
    """Stops everything: SIGTERM in order, and SIGKILL at the deadline.

    Args:
      deadline_s: seconds until what is left is killed.

    Returns:
      A line for each process that did not end as it should: it had to be
      killed, or failed to save what it holds.
    """
    start_s = time.monotonic()
    for process in self._processes:
      process.restart_at_s = None
    first = [p for p in self._processes if not p.spec.stop_last]
    last = [p for p in self._processes if p.spec.stop_last]
    self._terminate(first)
    self._wait(first, start_s + deadline_s * _FIRST_SHARE)
    self._terminate(last)
    self._wait(self._processes, start_s + deadline_s)
    killed = [p for p in self._processes if p.running]
    for process in killed:
      self._troubles.append(
        f'{process.spec.name} (pid {process.popen.pid}) did not end within '
        f'{deadline_s:g} s and was killed'
      )
      _kill_group(process.popen.pid)
    self._wait(killed, time.monotonic() + 1.0)
    for trouble in self._troubles:
      self._say(trouble)
    return self._troubles

  def _spawn(self, process: _Process) -> None:
    spec = process.spec
    process.restart_at_s = None
    command = spec.command
    if process.starts and spec.restart_command:
      command = spec.restart_command
    with (self._log_dir / f'{spec.name}.log').open('ab') as log:
      _write_start_line(log)
      process.popen = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=self._environ,
        process_group=0,
      )
    process.starts += 1
    process.started_s = time.monotonic()

  def _reap(self, process: _Process) -> bool:
    """Whether the child has ended; takes its own children down with it."""
    if process.popen.poll() is None:
      return False
    _kill_group(process.popen.pid)
    return True

  def _on_exit(self, process: _Process, now: float) -> None:
    status = process.popen.returncode
    process.popen = None
    spec = process.spec
    if spec.completes and status == 0:
      self._end(Outcome(False, f'{spec.name} completed', completed=True))
    elif spec.completes and status == shutdown.STOPPED_STATUS:
      self._end(Outcome(False, f'{spec.name} was told to stop by a signal'))
    elif not spec.restart or status == _USER_ERROR_STATUS:
      reason = f'{spec.name} ended ({describe_status(status)})'
      self._fail(process, reason + self._told(spec.name), status)
    elif spec.group:
      self._schedule_group_restart(process, status, now)
    else:
      self._schedule_restart(process, status, now)

  def _schedule_group_restart(
    self, process: _Process, status: int, now: float
  ) -> None:
    """Ends the rest of the group at once: they may wait for the dead one."""
    first, *rest = (
      p for p in self._processes if p.spec.group == process.spec.group
    )
    for member in (first, *rest):
      if member.running:
        _kill_group(member.popen.pid)
        member.popen.wait()
        member.popen = None
    # The first one keeps the group's history of deaths.
    self._schedule_restart(first, status, now, dead=process.spec.name)
    for member in rest:
      member.restart_at_s = first.restart_at_s

  def _schedule_restart(
    self, process: _Process, status: int, now: float, dead: str = ''
  ) -> None:
    name = dead or process.spec.name
    healthy = now - process.started_s >= self._back_off.healthy_s
    process.deaths_in_a_row = 1 if healthy else process.deaths_in_a_row + 1
    if process.deaths_in_a_row >= self._back_off.max_deaths:
      self._fail(
        process,
        f'{name} died {process.deaths_in_a_row} times in a row without '
        f'progress (last: {describe_status(status)}); giving up',
        status,
      )
      return
    process.delay_s = (
      self._back_off.first_s
      if healthy or not process.delay_s
      else min(2 * process.delay_s, self._back_off.longest_s)
    )
    process.restart_at_s = now + process.delay_s
    told, what = '', 'restart'
    if dead:
      told, what = self._told(name), f'restart of group {process.spec.group}'
    self._say(
      f'{name} died ({describe_status(status)}){told}; {what} in '
      f'{process.delay_s:g} s'
    )

  def _fail(self, process: _Process, reason: str, status: int) -> None:
    path = self._log_dir / f'{process.spec.name}.log'
    self._end(
      Outcome(
        True,
        reason,
        f'The end of {path}:\n{_tail(path)}',
        user_error=status == _USER_ERROR_STATUS,
      )
    )

  def _told(self, name: str) -> str:
    """The one line in which a role told why it ended, if it did."""
    lines = [
      line.strip()
      for line in _tail(self._log_dir / f'{name}.log').splitlines()
      if line.strip().startswith('error: ')
    ]
    if lines:
      return ': ' + lines[-1].removeprefix('error: ')
    if shutil.disk_usage(self._log_dir).free < _LOG_TAIL_BYTES:
      return f': no space is left on the device of {self._log_dir}'
    return ''

  def _end(self, outcome: Outcome) -> None:
    if self.outcome is None:  # The first cause is the one to report.
      self.outcome = outcome

  def _note_end(self, process: _Process) -> None:
    """Notes how a process ended that was told to stop."""
    spec, status = process.spec, process.popen.returncode
    if spec.saves and status > 0 and status != shutdown.STOPPED_STATUS:
      self._troubles.append(
        f'{spec.name} ended ({describe_status(status)}){self._told(spec.name)}'
      )

  def _terminate(self, processes: Sequence[_Process]) -> None:
    for process in processes:
      if process.running and process.popen.poll() is None:
        process.popen.terminate()

  def _wait(self, processes: Sequence[_Process], until_s: float) -> None:
    while True:
      for process in processes:
        if process.running and self._reap(process):
          self._note_end(process)
          process.popen = None
      remaining_s = until_s - time.monotonic()
      if remaining_s <= 0 or not any(p.running for p in processes):
        return
      time.sleep(min(0.02, remaining_s))


_START_LINE = b'--- started '


def describe_status(status: int) -> str:
  """'status 1', or 'killed by SIGKILL' for a negative `returncode`."""
  if status >= 0:
    return f'status {status}'
  try:
    return f'killed by {signal.Signals(-status).name}'
  except ValueError:
    return f'killed by signal {-status}'


def _write_start_line(log: IO[bytes]) -> None:
  try:
    os.write(
      log.fileno(), _START_LINE + time.strftime('%F %T').encode() + b' ---\n'
    )
  except OSError:
    pass  # A full disk must not keep a dead actor from being restarted.


def _state(process: _Process) -> str:
  if process.running:
    return 'running'
  return 'ended' if process.restart_at_s is None else 'waiting to restart'


def _kill_group(pid: int) -> None:
  try:
    os.killpg(pid, signal.SIGKILL)
  except (ProcessLookupError, PermissionError):
    pass  # Nothing of the group is left.


def _tail(path: pathlib.Path) -> str:
  try:
    with path.open('rb') as file:
      size = file.seek(0, os.SEEK_END)
      file.seek(max(0, size - _LOG_TAIL_BYTES))
      data = file.read()
  except OSError as e:
    return f'  (unreadable: {e})'
  data = data.rpartition(_START_LINE)[2].partition(b'\n')[2]
  lines = data.decode(errors='replace').rstrip().splitlines()
  return '\n'.join(f'  {line}' for line in lines[-_LOG_TAIL_LINES:])
