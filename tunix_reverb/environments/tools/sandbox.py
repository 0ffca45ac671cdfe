"""Where a policy's Python runs: with no network, no files of ours, no end.

Two sandboxes: `bubblewrap` (Linux namespaces; all of Python) and `monty` (an
interpreter of a subset of Python). `find` takes the first that works and
refuses where none does: nothing ever runs outside of one.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
import dataclasses

from absl import logging

from tunix_reverb import errors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """Of one run.

  Attributes:
    wall_s: seconds from start to end.
    cpu_s: whole seconds of processor time, of each process.
    memory_bytes: of address space, of each process.
    max_processes: and threads, at once.
    disk_bytes: of all files the program writes; they go with it.
    output_bytes: of what it prints.
  """

  wall_s: float = 10.0
  cpu_s: int = 5
  memory_bytes: int = 256 << 20
  max_processes: int = 8
  disk_bytes: int = 16 << 20
  output_bytes: int = 64 << 10

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not value > 0:
        raise errors.UserError(f'{field.name} ({value}) must be > 0')


@dataclasses.dataclass(frozen=True)
class Result:
  """Of one run.

  Attributes:
    output: what the program printed, on both streams, as far as it was read.
    succeeded: whether it ran to its end without an exception.
    stopped: why it was stopped: 'time', 'memory' or 'output'; None if it ended
      by itself.
  """

  output: str
  succeeded: bool
  stopped: str | None = None


class Sandbox(abc.ABC):
  """Runs programs that nobody trusts."""

  def __init__(self, limits: Limits):
    """Args: limits: of each run."""
    self.limits = limits

  @abc.abstractmethod
  def run(self, program: str) -> Result:
    """Runs Python source; may be called from several threads.

    Raises:
      taxonomy.SandboxError: the sandbox itself did not work.
    """

  def close(self) -> None:
    """Ends what it started."""
    return


def find(limits: Limits | None = None) -> Sandbox:
  """The best sandbox of this machine.

  Args:
    limits: of each run.

  Raises:
    errors.UserError: there is none; says what to install and why each failed.
  """
  # Each of them imports this module.
  from tunix_reverb.environments.tools import bubblewrap
  from tunix_reverb.environments.tools import monty

  limits = limits or Limits()
  return first_that_works(
    {
      'bubblewrap': lambda: bubblewrap.Bubblewrap(limits),
      'pydantic-monty': lambda: monty.Monty(limits),
    }
  )


def first_that_works(makers: dict[str, Callable[[], Sandbox]]) -> Sandbox:
  """The first sandbox that can be made.

  Args:
    makers: by what there is to install; each raises UserError if it cannot.
  """
  problems = []
  for name, make in makers.items():
    try:
      return make()
    except errors.UserError as e:
      logging.log_first_n(logging.WARNING, 'no sandbox by %s: %s', 1, name, e)
      problems.append(f'{name} ({e})')
  raise errors.UserError(
    'code of a policy runs in a sandbox or not at all, and none works: '
    + '; '.join(problems)
    + '. Install one: `apt-get install bubblewrap`, or '
    "`pip install 'tunix_reverb[agents]'` for pydantic-monty"
  )
