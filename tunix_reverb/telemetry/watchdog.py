"""Ends a role that makes no progress, with one line that says why."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import itertools
import os
import sys
import threading
import time

EXIT_STATUS = 3


def _exit(line: str) -> None:
  """Prints `line` and ends the process at once, past anything that blocks."""
  print(line, file=sys.stderr, flush=True)
  os._exit(EXIT_STATUS)


class Watchdog:
  """Calls `on_expire` after `timeout_s` seconds without `progress`.

  Attributes:
    has_begun: whether `progress` was ever called: before, a role is starting
      and has nothing to save.

  Name what you wait for, and the line says who waits on whom for how long:

    with watchdog.waiting('learner waits for items of table trajectories'):
      item = sampler.sample(timeout_s=1.0)
  """

  def __init__(
    self,
    timeout_s: float,
    *,
    role: str,
    on_expire: Callable[[str], None] = _exit,
  ):
    """Creates a watchdog; `start` arms it.

    Args:
      timeout_s: seconds without progress until it expires.
      role: whose progress it is, such as `actor_0`.
      on_expire: gets the line; by default prints it and exits with status 3.
    """
    self._timeout_s = timeout_s
    self._role = role
    self._on_expire = on_expire
    self._progress_s = time.monotonic()
    self.has_begun = False
    self._waits: dict[int, tuple[str, float]] = {}
    self._ids = itertools.count()
    self._closed = threading.Event()

  def start(self) -> None:
    """Arms the watchdog; counting starts now."""
    self._progress_s = time.monotonic()
    threading.Thread(target=self._watch, name='watchdog', daemon=True).start()

  def progress(self) -> None:
    """Says that the role is getting on; call it once per unit of work."""
    self._progress_s = time.monotonic()
    self.has_begun = True

  @contextlib.contextmanager
  def waiting(self, what: str) -> Iterator[None]:
    """Names a wait, such as 'actor_0 waits for variables of localhost:1'."""
    key = next(self._ids)
    self._waits[key] = (what, time.monotonic())
    try:
      yield
    finally:
      del self._waits[key]

  def describe_waits(self) -> str:
    """The waits going on, longest first; empty if there are none."""
    now = time.monotonic()
    waits = sorted(list(self._waits.values()), key=lambda wait: wait[1])
    return '; '.join(
      f'{what} (for {now - since:.1f} s)' for what, since in waits
    )

  def close(self) -> None:
    """Disarms the watchdog; idempotent."""
    self._closed.set()

  def _watch(self) -> None:
    period_s = min(1.0, self._timeout_s / 10)
    last_s = time.monotonic()
    while not self._closed.wait(period_s):
      now = time.monotonic()
      if now - last_s > 2.0 + 5 * period_s:
        # The whole process was suspended: nobody could make progress.
        self._progress_s += now - last_s
      last_s = now
      idle_s = now - self._progress_s
      if idle_s >= self._timeout_s:
        self._on_expire(self._line(idle_s))
        return

  def _line(self, idle_s: float) -> str:
    what = self.describe_waits() or f'it is in {_main_thread_location()}'
    return f'error: {self._role}: no progress for {idle_s:.1f} s: {what}'


def _main_thread_location() -> str:
  frame = sys._current_frames().get(threading.main_thread().ident)
  if frame is None:
    return 'no Python code'
  code = frame.f_code
  return f'{code.co_filename}:{frame.f_lineno} {code.co_name}'
