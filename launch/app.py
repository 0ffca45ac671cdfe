"""The frame of every binary: flags, environment, signals, errors, exit."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import os
import pathlib
import sys
import threading
import time
import traceback
from typing import Any
from typing import NoReturn

from absl import logging

from launch import flags
from launch import shutdown
from launch import streams
from tunix_reverb import errors
from tunix_reverb.agents import config as config_lib
from tunix_reverb.telemetry import logger as logger_lib
from tunix_reverb.telemetry import watchdog as watchdog_lib

_SINGLE_THREADED_XLA = (
  '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1'
)


@dataclasses.dataclass(frozen=True)
class RoleContext:
  """What a role's `main` is given.

  Attributes:
    role: the process's name, such as `actor_0`.
    config: the experiment config.
    run_dir: the run directory; None if `--run_dir` was not given.
    stop: set when the role must end; every loop looks at it.
    logger: writes the role's metrics.
    watchdog: ends the role when it makes no progress.
  """

  role: str
  config: config_lib.ExperimentConfig
  run_dir: pathlib.Path | None
  stop: threading.Event
  logger: logger_lib.MetricLogger
  watchdog: watchdog_lib.Watchdog


def run(
  main: Callable[[RoleContext], int | None],
  *,
  role: str,
  make_role_name: Callable[[Any], str] | None = None,
  single_threaded_xla: bool = False,
  stop_deadline_s: float = 9.0,
) -> NoReturn:
  """Parses the flags, runs `main` and ends the process; never returns.

  The status is what `main` returns (None is 0), 2 after a user's mistake (one
  line on stderr), 1 after any other exception in any thread, 3 when the
  watchdog expired. Import whatever is heavy inside `main`, so that flags are
  answered at once and the environment is set first.

  Args:
    main: the role.
    role: its name; `python -m launch.<role>`.
    make_role_name: FLAGS -> name of this process, such as `actor_3`.
    single_threaded_xla: keeps XLA on one CPU core.
    stop_deadline_s: seconds from a stop signal to the end, at most.
  """
  streams.install()
  status = 1
  try:
    status = _run(
      main, role, make_role_name, single_threaded_xla, stop_deadline_s
    )
  except errors.UserError as e:
    print(f'error: {e}', file=sys.stderr)
    status = 2
  except SystemExit as e:
    status = e.code if isinstance(e.code, int) else 1
  except BaseException:  # pylint: disable=broad-except
    traceback.print_exc()
  shutdown.exit_now(status)


def _run(main, role, make_role_name, single_threaded_xla, stop_deadline_s):
  flags.define_config_flags()
  flags.define_role_flags()
  if flags.print_help_if_asked(sys.argv, binary_doc(role)):
    return 0
  flags.parse(sys.argv)
  if flags.FLAGS.supervised:
    parent_pid = os.environ.get(shutdown.PARENT_PID, os.getppid())
    shutdown.die_with_parent(int(parent_pid))
  config = flags.config_from_flags()
  set_environment(role, single_threaded_xla)
  if role == 'learner' and config.mesh.virtual_devices:
    add_virtual_devices(config.mesh.virtual_devices)
  logging.set_verbosity(logging.WARNING)
  # A user's own `module:factory` is looked for where the binary was started.
  sys.path.append(os.getcwd())
  if single_threaded_xla:
    keep_jax_in_the_callers_thread()
  signals = shutdown.StopSignals()
  signals.install()
  shutdown.exit_on_thread_exception()
  name = make_role_name(flags.FLAGS) if make_role_name else role
  run_dir = flags.FLAGS.run_dir and pathlib.Path(flags.FLAGS.run_dir)
  watchdog = watchdog_lib.Watchdog(config.watchdog_s, role=name)
  shutdown.enforce_deadline(
    signals.stop,
    stop_deadline_s,
    has_begun=lambda: watchdog.has_begun,
    describe=lambda: watchdog.describe_waits() or shutdown.describe_threads(),
  )
  logger = logger_lib.MetricLogger(run_dir or None, name)
  watchdog.start()
  try:
    return (
      main(
        RoleContext(
          role=name,
          config=config,
          run_dir=run_dir or None,
          stop=signals.stop,
          logger=logger,
          watchdog=watchdog,
        )
      )
      or 0
    )
  finally:
    watchdog.close()
    logger.close()


def run_command(
  main: Callable[[], int | None], *, name: str, with_config: bool = False
) -> NoReturn:
  """Parses the flags, runs `main`, which is no role, and exits.

  The status is what `main` returns (None is 0), or 2 after a user's mistake,
  with one line on stderr.

  Args:
    main: the command.
    name: `python -m launch.<name>`.
    with_config: whether it takes the config's flags.
  """
  streams.install()
  if with_config:
    flags.define_config_flags()
  doc = binary_doc(name)
  if flags.print_help_if_asked(sys.argv, doc, with_config=with_config):
    sys.exit(0)
  try:
    flags.parse(sys.argv)
    status = main()
  except errors.UserError as e:
    print(f'error: {e}', file=sys.stderr)
    status = 2
  sys.exit(status)


def set_environment(role: str, single_threaded_xla: bool = False) -> None:
  """Sets what must be in `os.environ` before gRPC, TensorFlow and JAX load."""
  for name in ('no_proxy', 'NO_PROXY'):  # A proxy must not see localhost.
    hosts = [h for h in os.environ.get(name, '').split(',') if h]
    local = [h for h in ('localhost', '127.0.0.1', '::1') if h not in hosts]
    os.environ[name] = ','.join(hosts + local)
  if role == 'replay_server':
    os.environ['TZ'] = 'UTC'  # Reverb names its checkpoints by local time.
    time.tzset()
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')
  os.environ.setdefault('GRPC_VERBOSITY', 'ERROR')
  os.environ.setdefault('MUJOCO_GL', 'disabled')  # dm_control opens a display.
  xla_flags = os.environ.get('XLA_FLAGS', '')
  if single_threaded_xla and 'xla_cpu_multi_thread_eigen' not in xla_flags:
    os.environ['XLA_FLAGS'] = f'{xla_flags} {_SINGLE_THREADED_XLA}'.strip()


def add_virtual_devices(count: int) -> None:
  """Makes JAX split the CPU into `count` devices; call it before JAX loads."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  # In front: XLA reads no further than a flag without dashes.
  os.environ['XLA_FLAGS'] = (
    f'--xla_force_host_platform_device_count={count} '
    + os.environ.get('XLA_FLAGS', '')
  ).strip()


def keep_jax_in_the_callers_thread() -> None:
  """Runs JAX's CPU programs where they are called, for the whole process.

  A small policy's call takes 44 us instead of 140 us: the hand-over to XLA's
  thread and back costs more than the network.
  """
  import jax

  jax.config.update('jax_cpu_enable_async_dispatch', False)


def binary_doc(role: str) -> str:
  """What `--help` says first: how to start it, and its module's docstring."""
  module_doc = sys.modules['__main__'].__doc__
  return f'python -m launch.{role}\n\n{module_doc or ""}'
