"""One replay server: Reverb tables, their limits and their checkpoints."""

from __future__ import annotations

import contextlib
import time

from absl import flags as absl_flags

from launch import allocator
from launch import app
from launch import columns as columns_lib
from launch import flags
from launch import shutdown

absl_flags.DEFINE_integer(
  'server_index', 0, 'Number of this replay server (shard), from 0.'
)
absl_flags.DEFINE_integer('port', 0, 'TCP port to serve; 0 picks a free one.')
columns_lib.define_flag()
flags.define_replay_restore_flag()

_REPORT_PERIOD_S = 1.0
# Of the 9 s that a stop may take; the rest is for the server itself.
_LAST_CHECKPOINT_DEADLINE_S = 6.0


def run_server(context: app.RoleContext) -> int:
  """Serves until told to stop; then writes a checkpoint."""
  from tunix_reverb.agents import builder
  from tunix_reverb.replay import clients
  from tunix_reverb.telemetry import milestones as milestones_lib

  milestones = milestones_lib.Milestones(context.run_dir, context.role)
  milestones.mark('imported')
  config, run_dir = context.config, context.run_dir
  columns = columns_lib.find(context)
  if columns is None:
    return shutdown.stopped_status()
  server = clients.make_server(
    config=builder.make_table_config(config),
    columns=columns,
    port=flags.FLAGS.port,
    checkpoint_dir=(
      run_dir / 'checkpoints' / context.role if run_dir else None
    ),
    checkpoints_to_keep=config.replay.replay_checkpoints_to_keep,
    restore=flags.FLAGS.replay_restore == 'auto',
  )
  milestones.mark(f'serves on port {server.port}')
  if server.restored_from:
    milestones.mark(f'restored {server.restored_from}')
  with contextlib.ExitStack() as stack:
    stack.callback(server.stop, timeout_s=2.0)
    sweeper = builder.make_sweeper(config, server, columns)
    if sweeper is not None:
      stack.callback(sweeper.close)
      sweeper.start()
    _serve(context, server, sweeper)
    if run_dir is not None:
      server.checkpoint(_LAST_CHECKPOINT_DEADLINE_S)
  return 0


def _serve(context: app.RoleContext, server, sweeper) -> None:
  """Reports once a second and checkpoints by period.

  A server that does not answer makes no progress: on a busy host that passes,
  and what stays silent is ended by the watchdog.
  """
  from tunix_reverb import errors

  period_s = context.config.replay.replay_checkpoint_period_s
  saved_s = time.monotonic()
  checkpoint_s = 0.0
  step = 0
  while not context.stop.wait(_REPORT_PERIOD_S):
    now_s = time.monotonic()
    if period_s and context.run_dir and now_s - saved_s >= period_s:
      checkpoint_s = _checkpoint(context, server)
      saved_s = time.monotonic()
    try:
      with context.watchdog.waiting(f'{context.role} waits for its tables'):
        metrics = server.limiter_metrics(timeout_s=1.0)
    except errors.ReplayUnavailableError:
      continue
    context.watchdog.progress()
    step += 1
    metrics['replay_checkpoint_s'] = checkpoint_s
    if sweeper is not None:
      metrics |= sweeper.metrics()
    context.logger.write(metrics, step)


def _checkpoint(context: app.RoleContext, server) -> float:
  """Writes a checkpoint; a full disk is told, and serving goes on."""
  from tunix_reverb import errors

  began_s = time.monotonic()
  try:
    with context.watchdog.waiting(f'{context.role} waits for its checkpoint'):
      server.checkpoint(context.config.watchdog_s)
  except (errors.CheckpointError, errors.DeadlineExceededError) as e:
    print(f'warning: {e}', flush=True)
  return time.monotonic() - began_s


def main() -> None:
  """Entry point."""
  allocator.keep_freed_memory()
  app.run(
    run_server,
    role='replay_server',
    make_role_name=lambda f: f'replay_server_{f.server_index}',
    single_threaded_xla=True,
  )


if __name__ == '__main__':
  main()
