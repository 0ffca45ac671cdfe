"""What every test runs under: strict JAX, eight CPU devices, no leaks.

The environment is set before anything imports JAX or TensorFlow. It reaches
processes that a test spawns; a test that runs a binary as its user would takes
the `subprocess_env` fixture instead, which carries none of it.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
import time

_USER_ENVIRON = dict(os.environ)

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = ' '.join(
  (
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
    # Most of what tests do is to compile; a third less of it.
    '--xla_backend_optimization_level=0',
  )
).strip()
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'
os.environ['GRPC_VERBOSITY'] = 'ERROR'
# gRPC would send even localhost through a proxy named in the environment.
_NO_PROXY = {'no_proxy': 'localhost,127.0.0.1,::1'}
os.environ.update(_NO_PROXY)

import jax  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402

# Silent broadcasting and silent widening are how a loss goes wrong unnoticed.
jax.config.update('jax_numpy_rank_promotion', 'raise')
jax.config.update('jax_numpy_dtype_promotion', 'strict')
# The default differs between the JAX versions we support; results must not.
jax.config.update('jax_threefry_partitionable', True)

# How long a process or thread that a test closed may take to be gone.
_LEAK_GRACE_S = 3.0

# Helpers that outlive a test by design: Python's own, one per session, and the
# pools of libraries, which their owner joins at exit.
_KEPT_PROCESSES = ('multiprocessing.resource_tracker',)
_KEPT_THREADS = (
  'ThreadPoolExecutor',  # executors without a name: orbax, asyncio
  'asyncio_',
  'metadata_store',  # orbax
  'ocdbt',
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Skips what starts a replay server in this process, in the modern lane."""
  if importlib.util.find_spec('reverb') is not None:
    return
  skip = pytest.mark.skip(reason='needs dm-reverb, which this lane is without')
  for item in items:
    if item.get_closest_marker('replay') is not None:
      item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
  """Pytest is about to collect garbage five times, minutes of what JAX holds.

  What is no garbage after the first time is not looked at again.
  """
  gc.collect()
  gc.freeze()


def _child_processes() -> dict[int, str]:
  """Returns pid -> command line of every living descendant."""
  found = {}
  for process in psutil.Process().children(recursive=True):
    try:
      if process.status() == psutil.STATUS_ZOMBIE:
        continue
      command = ' '.join(process.cmdline())
    except psutil.NoSuchProcess:
      continue
    if not any(kept in command for kept in _KEPT_PROCESSES):
      found[process.pid] = command
  return found


def _threads() -> dict[int, str]:
  """Returns id -> name of every living thread that would block the exit."""
  return {
    id(thread): thread.name
    for thread in threading.enumerate()
    if not thread.daemon
    and thread is not threading.main_thread()
    and not thread.name.startswith(_KEPT_THREADS)
  }


def _leaks(processes: set[int], threads: set[int]) -> list[str]:
  """Returns what lives beyond `processes` and `threads` after the grace."""
  deadline_s = time.monotonic() + _LEAK_GRACE_S
  while True:
    left = [
      f'process {pid}: {command[:200]}'
      for pid, command in _child_processes().items()
      if pid not in processes
    ] + [
      f'non-daemon thread {name!r}'
      for key, name in _threads().items()
      if key not in threads
    ]
    if not left or time.monotonic() > deadline_s:
      return left
    time.sleep(0.02)


def _kill_new_processes(processes: set[int]) -> None:
  """Ends leaked processes, so that only the test that leaked them fails."""
  for pid in _child_processes().keys() - processes:
    try:
      psutil.Process(pid).kill()
    except psutil.NoSuchProcess:
      continue


@pytest.fixture(autouse=True)
def no_leaks():
  """Fails a test that leaves a child process or a non-daemon thread behind.

  What a fixture of wider scope started before the test is not counted here,
  but by `no_leaks_at_the_end`.
  """
  processes, threads = set(_child_processes()), set(_threads())
  yield
  left = _leaks(processes, threads)
  if left:
    _kill_new_processes(processes)
    pytest.fail('the test must close what it starts; left: ' + '; '.join(left))


@pytest.fixture(autouse=True, scope='session')
def no_leaks_at_the_end():
  """Fails the session if a fixture of wider scope left something behind."""
  processes, threads = set(_child_processes()), set(_threads())
  yield
  left = _leaks(processes, threads)
  if left:
    _kill_new_processes(processes)
    pytest.fail('fixtures must close what they start; left: ' + '; '.join(left))


@pytest.fixture(autouse=True)
def dtype_promotion(request: pytest.FixtureRequest):
  """Strict, unless the test is marked `standard_dtype_promotion`.

  The mark is for tests that run an optax optimiser: adam's bias correction and
  the schedules mix an int32 count with Python floats.
  """
  if request.node.get_closest_marker('standard_dtype_promotion') is None:
    yield
    return
  jax.config.update('jax_numpy_dtype_promotion', 'standard')
  yield
  jax.config.update('jax_numpy_dtype_promotion', 'strict')


@pytest.fixture(scope='session')
def server_python() -> str:
  """The interpreter for a replay server in a process of its own.

  In the modern lane, which cannot serve, `make` names that of the other lane.
  """
  if importlib.util.find_spec('reverb') is not None:
    return sys.executable
  named = os.environ.get('TUNIX_REVERB_SERVER_PYTHON')
  if not named:
    pytest.skip(
      'dm-reverb is missing, and TUNIX_REVERB_SERVER_PYTHON does not name an '
      'interpreter that has it'
    )
  return named


@pytest.fixture
def subprocess_env() -> dict[str, str]:
  """The user's environment, for a binary run as a process with cwd=tmp_path.

  One CPU device and JAX's defaults. A relative PYTHONPATH is made absolute:
  the process finds the same `tunix_reverb` as the tests do, checkout or wheel.
  """
  env = dict(_USER_ENVIRON) | _NO_PROXY
  env |= {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3'}
  if env.get('PYTHONPATH'):
    env['PYTHONPATH'] = os.pathsep.join(
      os.path.abspath(path) for path in env['PYTHONPATH'].split(os.pathsep)
    )
  return env
