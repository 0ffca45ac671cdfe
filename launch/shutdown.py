"""How a role ends: signals, deadlines, failing threads, a dead parent.

Roles call into C++ that no signal can interrupt, so Python's own handlers
(which need the main thread) are not enough. Here the C-level handler writes
the signal's number to a pipe and a thread reads it: the stop flag is set, and
the deadline kept, whatever the main thread is doing.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A second signal sooner than this is taken for an echo of the first: `timeout`
# and shells signal a process and then its group.
_ECHO_S = 1.0
# A role that is still starting (importing, compiling) cannot look at the stop
# flag, and has nothing to save: it is given this long.
_START_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1

# Status of a role that a signal ended early, told to its supervisor only.
STOPPED_STATUS = 4

# Environment variable that tells a supervised role its supervisor's pid.
PARENT_PID = 'TUNIX_REVERB_PARENT_PID'

# Set in a role that `die_with_parent` has tied to its parent.
_supervisor_pid = 0


class StopSignals:
  """Sets `stop` on SIGTERM, SIGINT or SIGHUP; a second one exits at once.

  Attributes:
    stop: set by the first signal.
    signum: the first signal's number; 0 before.
  """

  def __init__(self) -> None:
    self.stop = threading.Event()
    self.signum = 0
    self._reader: socket.socket | None = None

  def install(self) -> None:
    """Takes over the signals; call it once, from the main thread."""
    self._reader, writer = socket.socketpair()
    writer.setblocking(False)
    # The write end must stay open for the life of the process.
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    take_over_signals()
    threading.Thread(
      target=self._listen, name='stop signals', daemon=True
    ).start()

  def _listen(self) -> None:
    first_s = 0.0
    while True:
      signum = self._reader.recv(1)[0]
      if signum not in _SIGNALS:
        continue
      if not self.stop.is_set() or not self.signum:
        self.signum, first_s = signum, time.monotonic()
        self.stop.set()
      elif time.monotonic() - first_s > _ECHO_S:
        exit_now(128 + signum)


def take_over_signals() -> None:
  """Has signals noted by Python; call it after what takes them for itself."""
  for signum in _SIGNALS:
    signal.signal(signum, lambda *_: None)


def enforce_deadline(
  stop: threading.Event,
  deadline_s: float,
  *,
  has_begun: Callable[[], bool],
  describe: Callable[[], str],
) -> None:
  """Ends the process `deadline_s` seconds after `stop`, whatever blocks.

  Args:
    stop: the stop flag.
    deadline_s: seconds from the flag to the end.
    has_begun: whether there may be something to save; if not, the process ends
      sooner, with `stopped_status`.
    describe: names what the process is still waiting for, for the one line
      that is printed.
  """

  def watch() -> None:
    stop.wait()
    # A C thread that needs no GIL, should C++ code hold it.
    faulthandler.dump_traceback_later(deadline_s + 0.3, exit=True)
    time.sleep(min(_START_GRACE_S, deadline_s))
    if not has_begun():
      print('stopped while starting; there was nothing to save')
      exit_now(stopped_status())
    time.sleep(max(0.0, deadline_s - _START_GRACE_S))
    print(
      f'error: did not end within {deadline_s:g} s of the request to stop; '
      f'still waiting: {describe()}',
      file=sys.stderr,
    )
    exit_now(1)

  threading.Thread(target=watch, name='stop deadline', daemon=True).start()


def exit_on_thread_exception() -> None:
  """Makes an exception in any thread end the process with its traceback."""

  def hook(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
      return
    name = args.thread.name if args.thread else 'unknown'
    print(f'error: thread {name!r} failed:', file=sys.stderr)
    traceback.print_exception(
      args.exc_type, args.exc_value, args.exc_traceback, file=sys.stderr
    )
    exit_now(1)

  threading.excepthook = hook


def stopped_status() -> int:
  """The exit status of a role that a signal ended in order.

  It is 0, as of any program that does what it is told, but for a supervisor,
  to which 0 means that all the work is done.
  """
  return STOPPED_STATUS if _supervisor_pid else 0


def exit_now(status: int) -> NoReturn:
  """Flushes stdout and stderr and ends the process without any teardown.

  The teardown of gRPC, TensorFlow or a thread pool may take seconds or hang;
  what must be closed has been closed by its owner by now.
  """
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (OSError, ValueError, AttributeError):
      pass
  if _supervisor_pid and os.getppid() != _supervisor_pid:
    # Nobody is left to end what this role has started.
    if os.getpgrp() == os.getpid():
      os.killpg(os.getpid(), signal.SIGKILL)
  os._exit(status)


def die_with_parent(parent_pid: int) -> None:
  """Asks the kernel for SIGTERM when the parent `parent_pid` dies.

  If it is dead already, the signal comes at once. It comes, too, when the
  *thread* that started the child ends.
  """
  global _supervisor_pid
  _supervisor_pid = parent_pid
  libc = ctypes.CDLL(None, use_errno=True)
  libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
  if os.getppid() != parent_pid:  # It died before the request was made.
    os.kill(os.getpid(), signal.SIGTERM)


def describe_threads() -> str:
  """Where the main thread is, and which other threads hold up an exit."""
  frame = sys._current_frames().get(threading.main_thread().ident)
  parts = []
  if frame is not None:
    code = frame.f_code
    parts.append(
      f'main thread in {code.co_filename}:{frame.f_lineno} {code.co_name}'
    )
  parts += [
    f'thread {thread.name!r}'
    for thread in threading.enumerate()
    if not thread.daemon and thread is not threading.main_thread()
  ]
  return ', '.join(parts)
