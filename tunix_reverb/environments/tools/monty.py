"""A sandbox without the operating system: Pydantic's Monty.

An interpreter of a subset of Python, in a worker process: no files, no network,
no processes, few modules (see its documentation). It is there for machines
where `bubblewrap` is not.
"""

from __future__ import annotations

import threading
from typing import Any

from tunix_reverb import errors
from tunix_reverb.environments.tools import sandbox
from tunix_reverb.environments.tools import taxonomy

_MAX_RECURSION = 500


class Monty(sandbox.Sandbox):
  """See the module's docstring. Its worker starts with the first run."""

  def __init__(self, limits: sandbox.Limits):
    """Args: limits: of each run; files and processes there are none.

    Raises:
      errors.UserError: pydantic-monty is not installed.
    """
    super().__init__(limits)
    try:
      import pydantic_monty
    except ImportError as e:
      raise errors.UserError(f'pydantic-monty is not installed: {e}') from e
    self._monty = pydantic_monty
    self._lock = threading.Lock()
    self._pool: Any = None

  def _workers(self) -> Any:
    with self._lock:
      if self._pool is None:
        self._pool = self._monty.Monty(
          max_processes=self.limits.max_processes,
          checkout_timeout=self.limits.wall_s,
          request_timeout=self.limits.wall_s,
        )
        self._pool.__enter__()
      return self._pool

  def run(self, program: str) -> sandbox.Result:
    monty, limits = self._monty, self.limits
    printed = monty.CollectString(max_bytes=limits.output_bytes)
    session = self._workers().checkout(
      limits={
        'max_feed_duration_secs': float(limits.cpu_s),
        'max_memory': limits.memory_bytes,
        'max_recursion_depth': _MAX_RECURSION,
        'max_total_sleep_secs': max(0.0, limits.wall_s - limits.cpu_s),
      }
    )
    try:
      with session:
        session.feed_run(program, print_callback=printed)
    except (monty.MontyRuntimeError, monty.MontySyntaxError) as e:
      return self._failure(printed.output, e)
    except (monty.MontyError, TimeoutError, OSError) as e:
      # The worker died, or did not answer; the pool starts another.
      raise taxonomy.SandboxError(f'{type(e).__name__}: {e}') from e
    return sandbox.Result(printed.output, True)

  def _failure(self, output: str, error: Any) -> sandbox.Result:
    """The result of a program that raised or was stopped."""
    text = f'{output}{error.display()}\n'
    cause = error.exception()
    stopped = None
    if isinstance(cause, TimeoutError):
      stopped = 'time'
    elif isinstance(cause, MemoryError):
      # Too much output is told as too much memory.
      is_flood = f'> {self.limits.output_bytes} bytes' in str(error)
      stopped = 'output' if is_flood else 'memory'
    return sandbox.Result(text, False, stopped)

  def close(self) -> None:
    with self._lock:
      pool, self._pool = self._pool, None
    if pool is not None:
      pool.__exit__(None, None, None)
