"""The processes of one learner find each other and share their devices."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import inspect
import sys
from typing import Any

from absl import flags

from launch import app
from launch import shutdown
from launch import topology
from tunix_reverb import errors
from tunix_reverb.agents import config as config_lib
from tunix_reverb.telemetry import metrics

# How long a process waits for the others before a step: half of the minute
# after which JAX gives up by itself, with pages of text.
_PEER_TIMEOUT_S = 30.0
_HEARTBEAT_TIMEOUT_S = 50


def define_flags() -> None:
  """Defines what tells the learner processes apart."""
  flags.DEFINE_integer(
    'learner_index', 0, 'Number of this learner process, from 0.'
  )
  flags.DEFINE_string(
    'coordinator_address',
    None,
    'With num_learners > 1, host:port at which the first learner process '
    'listens for the others.',
  )


def role_name(index: int) -> str:
  """The first process is the one that users look at: it reports for all."""
  return f'{metrics.LEARNER}_{index}' if index else metrics.LEARNER


def given_role_name(given: Any) -> str:
  """Of the process with the flags `given`."""
  return role_name(given.learner_index)


def _check(config: config_lib.ExperimentConfig) -> None:
  index, count = flags.FLAGS.learner_index, config.mesh.num_learners
  address = flags.FLAGS.coordinator_address
  if not 0 <= index < count:
    raise errors.UserError(
      f'learner_index ({index}) must be >= 0 and < num_learners ({count})'
    )
  if count == 1:
    return
  if not address:
    raise errors.UserError(
      f'coordinator_address (none) must be host:port of the first learner '
      f'process with num_learners ({count}) > 1, the same for all of them'
    )
  topology.check_address('coordinator_address', address)


def join(context: app.RoleContext) -> Any:
  """Connects this process to the others; call before JAX has any device.

  Returns:
    `learner.group.Group`.

  Raises:
    errors.UserError: flags do not go together.
  """
  from tunix_reverb.learner import group as group_lib

  _check(context.config)
  count = context.config.mesh.num_learners
  if count == 1:
    return group_lib.Group()
  import jax

  from tunix_reverb.sharding import processes

  address = flags.FLAGS.coordinator_address
  # gloo must not run two programs at a time, which `app.run` sees to for roles
  # that keep XLA single-threaded.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  initialize = jax.distributed.initialize
  newer = {'heartbeat_timeout_seconds': _HEARTBEAT_TIMEOUT_S}
  names = inspect.signature(initialize).parameters
  with context.watchdog.waiting(
    f'{context.role} waits for the {count} learner processes at {address}'
  ):
    initialize(
      address,
      count,
      flags.FLAGS.learner_index,
      # The watchdog comes first, with a line that says what is waited for.
      initialization_timeout=int(context.config.watchdog_s) + 60,
      **{name: value for name, value in newer.items() if name in names},
    )
  shutdown.take_over_signals()  # From JAX, which would note preemptions.
  return group_lib.Group(
    processes.Exchange(
      timeout_s=_PEER_TIMEOUT_S, start_timeout_s=context.config.watchdog_s
    )
  )


@contextlib.contextmanager
def ending_alone(role: str) -> Iterator[None]:
  """Ends the process at once when the others are gone: nothing can be saved."""
  try:
    yield
  except errors.PeerLostError as e:
    print(f'error: {role}: {e}', file=sys.stderr)
    shutdown.exit_now(1)


def leave(group: Any) -> None:
  """Waits until all are through: the first one must not end before them."""
  if group.size > 1:
    import jax

    jax.distributed.shutdown()


def own_servers(
  addresses: Sequence[str], config: config_lib.ExperimentConfig
) -> list[str]:
  """The replay servers that this learner process reads from.

  Each process has servers of its own where their numbers allow that and actors
  write to all of them; otherwise all read from all.
  """
  count = config.mesh.num_learners
  if len(addresses) % count or config.actor.num_actors < len(addresses):
    return list(addresses)
  return list(addresses)[flags.FLAGS.learner_index :: count]
