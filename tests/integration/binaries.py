"""Binaries as processes, and what they leave in their run directory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
import signal
import subprocess
import time

import psutil
import pytest

# Whether this is the Reverb lane; in the other one only servers are of it.
HAS_REVERB = importlib.util.find_spec('reverb') is not None


class Process:
  """A binary that was started; its output goes to files."""

  def __init__(self, popen: subprocess.Popen, directory: pathlib.Path):
    self._popen = popen
    self._directory = directory
    self.pid = popen.pid

  @property
  def out(self) -> str:
    return (self._directory / 'out').read_text()

  @property
  def err(self) -> str:
    return (self._directory / 'err').read_text()

  @property
  def status(self) -> int | None:
    return self._popen.poll()

  def wait(self, timeout_s: float) -> int:
    """The exit status; what the binary said is in the error at a deadline."""
    try:
      return self._popen.wait(timeout_s)
    except subprocess.TimeoutExpired:
      pytest.fail(f'still runs after {timeout_s} s:\n{self.out}\n{self.err}')

  def stop(self, signum: int = signal.SIGTERM) -> int:
    """Sends a signal; the exit status, which must come within 10 s."""
    self._popen.send_signal(signum)
    return self.wait(10.0)

  def children(self) -> dict[str, psutil.Process]:
    """Running descendants by role name, such as `actor_0` or `learner`."""
    found = {}
    for child in psutil.Process(self.pid).children(recursive=True):
      with contextlib.suppress(psutil.Error):
        command = child.cmdline()
        role = next(
          (c.removeprefix('launch.') for c in command if 'launch.' in c), None
        )
        for flag in ('--actor_id=', '--server_index=', '--learner_index='):
          for argument in command:
            if argument.startswith(flag):
              role = f'{role}_{argument.removeprefix(flag)}'
        if role and child.status() != psutil.STATUS_ZOMBIE:
          found[role] = child
    return found

  def kill_all(self) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
      for child in psutil.Process(self.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
          child.kill()
    self._popen.kill()
    self._popen.wait(10)


def metrics(run_dir: pathlib.Path, role: str) -> list[dict]:
  """The complete lines of a role's metrics so far."""
  path = run_dir / 'metrics' / f'{role}.jsonl'
  if not path.exists():
    return []
  text = path.read_text().rpartition('\n')[0]
  return [json.loads(line) for line in text.splitlines() if line]


def last(run_dir: pathlib.Path, role: str, name: str, default=None):
  """The newest value of a metric."""
  values = [row[name] for row in metrics(run_dir, role) if name in row]
  return values[-1] if values else default


def wait_until(condition, process: Process, timeout_s: float = 60.0) -> None:
  """Waits for `condition`, while `process` must go on running."""
  deadline_s = time.monotonic() + timeout_s
  while not condition():
    said = f'{process.out}\n{process.err}'
    assert process.status is None, f'it ended with {process.status}:\n{said}'
    assert time.monotonic() < deadline_s, f'waited {timeout_s} s:\n{said}'
    time.sleep(0.1)


def wait_gone(processes, timeout_s: float = 10.0) -> None:
  """Fails unless every one of `processes` ends in time."""
  _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
  assert not alive


def damage(directory: pathlib.Path) -> None:
  """Changes a byte in the largest file below `directory`; more so each time."""
  path = max(
    (p for p in directory.rglob('*') if p.is_file()),
    key=lambda p: p.stat().st_size,
  )
  data = bytearray(path.read_bytes())
  data[len(data) // 2] = (data[len(data) // 2] + 1) % 256
  path.write_bytes(data)
