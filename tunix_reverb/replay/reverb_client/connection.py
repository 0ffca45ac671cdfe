"""Calls into Reverb's C++ client, made safe to wait for.

Almost every call of that client can block for ever and hear no signal. Here
such calls run in daemon threads with deadlines, and what a failed call leaves
behind is kept from ever being destroyed where its destructor would abort.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
import ctypes
import math
import threading
from typing import Any
from typing import TypeVar

from reverb import pybind
from reverb.cc import schema_pb2

from tunix_reverb import errors
from tunix_reverb.replay import health

T = TypeVar('T')

# What Reverb's C++ raises for a status that is not OK: ValueError for invalid
# arguments, IndexError for exhausted resources such as a full disk, or else
# RuntimeError.
STATUS_ERRORS = (RuntimeError, ValueError, IndexError)

# gRPC takes whole seconds; one call of the health check lasts at most this.
_PROBE_TIMEOUT_S = 1


def run_with_deadline(
  function: Callable[[], T], timeout_s: float, what: str
) -> T:
  """Runs `function` in a daemon thread and returns its result.

  At the deadline the thread is left to itself: it cannot be interrupted, and
  it does not hold up the end of the process.

  Args:
    function: what to run.
    timeout_s: seconds to wait for it.
    what: who waits on whom, for the message.

  Raises:
    errors.DeadlineExceededError: it did not end within `timeout_s`.
    Exception: whatever `function` raised.
  """
  outcome: dict[str, Any] = {}

  def run() -> None:
    try:
      outcome['result'] = function()
    except BaseException as e:  # Re-raised in the caller's thread.
      outcome['error'] = e

  thread = threading.Thread(target=run, daemon=True, name=what)
  thread.start()
  thread.join(max(timeout_s, 0.0))
  if thread.is_alive():
    raise errors.DeadlineExceededError(
      f'{what} did not end within {timeout_s:.1f} s'
    )
  if 'error' in outcome:
    raise outcome['error']
  return outcome['result']


class _BoundedCalls:
  """Lets the calls under way return before the interpreter ends.

  A daemon thread that comes back from C++ while Python finalises is unwound
  through frames that may not throw: the process would abort with status -6
  instead of its own. Calls without an end (a blocked flush) stay inside.
  """

  def __init__(self) -> None:
    self._changed = threading.Condition()
    self._under_way = 0
    self._ending = False
    atexit.register(self._end)

  def __enter__(self) -> None:
    with self._changed:
      if self._ending:
        raise RuntimeError('the process is ending')
      self._under_way += 1

  def __exit__(self, *exc_info: object) -> None:
    with self._changed:
      self._under_way -= 1
      self._changed.notify_all()

  def _end(self) -> None:
    with self._changed:
      self._ending = True
      self._changed.wait_for(lambda: not self._under_way, 3.0)


_BOUNDED_CALLS = _BoundedCalls()


def connect(address: str) -> pybind.Client:
  """A client of the server at `address`, 'host:port'; does not block."""
  return pybind.Client(address)


def table_infos(
  client: pybind.Client, timeout_s: float
) -> dict[str, schema_pb2.TableInfo]:
  """What the server says about its tables, by name; blocks up to `timeout_s`.

  Also fills the client's cache of signatures, without which its next writer
  would wait for the server without a deadline.

  Raises:
    STATUS_ERRORS: no answer within `timeout_s`, rounded up to whole seconds.
  """
  with _BOUNDED_CALLS:
    answers = client.ServerInfo(max(1, math.ceil(timeout_s)))
  infos = (schema_pb2.TableInfo.FromString(answer) for answer in answers)
  return {info.name: info for info in infos}


def keep_alive(cpp_object: object) -> None:
  """Keeps the destructor of `cpp_object` from running until `let_go`.

  A legacy Writer's destructor calls Close with the GIL held: after a lost
  stream that aborts the process, and on a blocked one it freezes it. So a
  writer is kept alive until it was closed properly, and one that cannot be
  is leaked on purpose.
  """
  ctypes.pythonapi.Py_IncRef(ctypes.py_object(cpp_object))


def let_go(cpp_object: object) -> None:
  """Ends `keep_alive`."""
  ctypes.pythonapi.Py_DecRef(ctypes.py_object(cpp_object))


class HealthCheck(health.HealthCheck):
  """See base class; asks through a C++ client of its own."""

  def __init__(self, address: str, period_s: float = 1.0):
    """See base class."""
    self._client = connect(address)
    super().__init__(address, period_s)

  def _ask(self) -> None:
    try:
      table_infos(self._client, _PROBE_TIMEOUT_S)
    except STATUS_ERRORS as e:
      raise errors.ReplayUnavailableError(str(e)) from e
