"""A sandbox of Linux namespaces, by the program `bwrap`.

The program sees /usr and nothing else of the machine's files, all of it
read-only but /tmp, a file system in memory. It has no network, not even the
host's loopback, sees no process of the host, has no capability and cannot make
namespaces of its own. Limits on processor, memory and processes are kernel
limits (`setrlimit`), set by a first program in the sandbox that it cannot
raise again. The number of processes counts within the sandbox's own user
namespace; the kernel never applies it to the real root, so a root process runs
`bwrap` as the user nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from tunix_reverb import errors
from tunix_reverb.environments.tools import sandbox
from tunix_reverb.environments.tools import taxonomy

_NOBODY = 65534
_PROBE_TIMEOUT_S = 20.0
_KILL_TIMEOUT_S = 5.0
_CHUNK_BYTES = 16384
# The sandbox's init, which takes one of the processes.
_OWN_PROCESSES = 1
_SYSTEM_DIRECTORIES = ('/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32')

# Soft limits are hard limits, but for processor time: at the soft one comes
# SIGXCPU, whose number says what happened.
_FIRST_PROGRAM = """
import os, resource, sys
for name, soft, hard in {limits}:
  resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (soft, hard))
source = sys.stdin.read()
os.dup2(os.open('/dev/null', os.O_RDONLY), 0)
sys.stdin = open(0)
del name, soft, hard, os, resource, sys
exec(compile(source, '<program>', 'exec'), {{'__name__': '__main__'}})
"""


class Bubblewrap(sandbox.Sandbox):
  """See the module's docstring."""

  def __init__(self, limits: sandbox.Limits):
    """Args: limits: of each run.

    Raises:
      errors.UserError: `bwrap` is absent, or does not work here.
    """
    super().__init__(limits)
    problem = _problem()
    if problem is not None:
      raise errors.UserError(problem)
    self._command = [*_isolation(limits), *_python(limits)]

  def run(self, program: str) -> sandbox.Result:
    with _sealed(program) as stdin:
      process = subprocess.Popen(
        self._command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd='/',
        env={},
        start_new_session=True,
        **_unprivileged(),
      )
    try:
      output, stopped = _read(process, self.limits)
    finally:
      # bwrap takes everything in the sandbox with it.
      process.kill()
      process.stdout.close()
      status = process.wait(_KILL_TIMEOUT_S)
    return _result(output.decode('utf-8', 'replace'), status, stopped)


def _result(output: str, status: int, stopped: str | None) -> sandbox.Result:
  """Args: status: of `bwrap`: the program's, or 128 and its signal."""
  if stopped is None and output.startswith('bwrap: ') and status == 1:
    raise taxonomy.SandboxError(f'the sandbox did not start: {output.strip()}')
  if stopped is None and status == 128 + signal.SIGXCPU:
    stopped = 'time'
  if stopped is None and status != 0:
    is_killed = status == 128 + signal.SIGKILL  # By the kernel: nobody else.
    if is_killed or 'MemoryError' in output.rpartition('Traceback')[2]:
      stopped = 'memory'
  return sandbox.Result(output, status == 0 and stopped is None, stopped)


def _read(
  process: subprocess.Popen, limits: sandbox.Limits
) -> tuple[bytes, str | None]:
  """Reads what is printed until it ends, or a limit; returns which limit."""
  deadline = time.monotonic() + limits.wall_s
  output = bytearray()
  with selectors.DefaultSelector() as selector:
    selector.register(process.stdout, selectors.EVENT_READ)
    while True:
      left_s = deadline - time.monotonic()
      if left_s <= 0 or not selector.select(left_s):
        return bytes(output), 'time'
      chunk = os.read(process.stdout.fileno(), _CHUNK_BYTES)
      output += chunk
      if len(output) > limits.output_bytes:
        return bytes(output[: limits.output_bytes]), 'output'
      if not chunk:
        break
  # All that could print is gone; bwrap follows.
  with contextlib.suppress(subprocess.TimeoutExpired):
    process.wait(max(0.0, deadline - time.monotonic()) + _KILL_TIMEOUT_S)
  return bytes(output), None


@contextlib.contextmanager
def _sealed(text: str) -> Any:
  """A descriptor to read `text` from, which nobody can write to."""
  descriptor = os.memfd_create('program', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
  try:
    with open(descriptor, 'wb', closefd=False) as file:
      file.write(text.encode('utf-8', 'replace'))
    fcntl.fcntl(
      descriptor,
      fcntl.F_ADD_SEALS,
      fcntl.F_SEAL_WRITE
      | fcntl.F_SEAL_GROW
      | fcntl.F_SEAL_SHRINK
      | fcntl.F_SEAL_SEAL,
    )
    os.lseek(descriptor, 0, os.SEEK_SET)
    yield descriptor
  finally:
    os.close(descriptor)


def _unprivileged() -> dict[str, Any]:
  """What makes a root process start another as nobody."""
  if os.geteuid() != 0:
    return {}
  return {'user': _NOBODY, 'group': _NOBODY, 'extra_groups': []}


def _isolation(limits: sandbox.Limits) -> list[str]:
  """`bwrap` and its flags."""
  command = [
    shutil.which('bwrap') or 'bwrap',
    '--unshare-all',
    '--unshare-user',
    '--disable-userns',
    '--die-with-parent',
    '--new-session',
    '--hostname', 'sandbox',
    '--uid', str(_NOBODY),
    '--gid', str(_NOBODY),
    '--cap-drop', 'ALL',
    '--clearenv',
    '--setenv', 'PATH', '/usr/bin:/bin',
    '--setenv', 'HOME', '/tmp',
    '--setenv', 'LANG', 'C.UTF-8',
    '--ro-bind', '/usr', '/usr',
  ]  # fmt: skip
  for path in _SYSTEM_DIRECTORIES:
    if os.path.islink(path):
      command += ['--symlink', os.readlink(path), path]
    elif os.path.isdir(path):
      command += ['--ro-bind', path, path]
  prefix = _python_prefix()
  if not prefix.startswith('/usr'):
    command += ['--ro-bind', prefix, prefix]
  return [
    *command,
    '--proc', '/proc',
    '--dev', '/dev',
    '--size', str(limits.disk_bytes),
    '--tmpfs', '/tmp',
    '--remount-ro', '/dev',
    '--remount-ro', '/',
    '--chdir', '/tmp',
  ]  # fmt: skip


def _python(limits: sandbox.Limits) -> list[str]:
  """The interpreter that sets the limits and becomes the program."""
  processes = limits.max_processes + _OWN_PROCESSES
  values = [
    ('CPU', limits.cpu_s, limits.cpu_s + 1),
    ('AS', limits.memory_bytes, limits.memory_bytes),
    ('NPROC', processes, processes),
    ('FSIZE', limits.disk_bytes, limits.disk_bytes),
    ('CORE', 0, 0),
  ]
  program = _FIRST_PROGRAM.format(limits=values)
  return [_interpreter(), '-I', '-u', '-c', program]


def _interpreter() -> str:
  """The system's Python; ours where there is none."""
  system = '/usr/bin/python3'
  return system if os.path.exists(system) else os.path.realpath(sys.executable)


def _python_prefix() -> str:
  return os.path.dirname(os.path.dirname(_interpreter()))


@functools.cache
def _problem() -> str | None:
  """Why `bwrap` cannot be used here; None if it can."""
  if not sys.platform.startswith('linux'):
    return 'bwrap needs Linux'
  if shutil.which('bwrap') is None:
    return 'bwrap is not installed'
  limits = sandbox.Limits()
  try:
    done = subprocess.run(
      [*_isolation(limits), *_python(limits)],
      input='print(6 * 7)',
      capture_output=True,
      text=True,
      cwd='/',
      env={},
      timeout=_PROBE_TIMEOUT_S,
      **_unprivileged(),
    )
  except (OSError, subprocess.SubprocessError) as e:
    return f'bwrap did not run: {e}'
  if done.stdout != '42\n':
    return f'bwrap does not work here: {(done.stderr or done.stdout).strip()}'
  return None
