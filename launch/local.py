"""Runs a whole experiment on this machine: every role as a process.

  python -m launch.local --environment=catch --solved_return=0.95

Starts replay servers, learner, actors and evaluator, restarts a server, actor
or evaluator that dies, shows the progress, and stops all of them within 10 s at
the end, at Ctrl-C, or when the learner dies. A SIGTERM to the learner alone
ends the run in order, too. Exit status: 0; 1 if something failed, a last
checkpoint could not be written, or a solved_return that was set has not been
reached; 2 for a mistake in flags or environment.
"""

from __future__ import annotations

import math
import pathlib

from absl import flags as absl_flags

from launch import app
from launch import columns
from launch import experiment
from launch import flags
from launch import interpreters
from launch import topology
from tunix_reverb import errors
from tunix_reverb.telemetry import metrics

absl_flags.DEFINE_boolean(
  'resume',
  False,
  'Continue the run in --run_dir from its checkpoints; flags that are given '
  'change its config.',
)
flags.define_replay_restore_flag()
interpreters.define_flags()


def run_local(context: app.RoleContext) -> int:
  """Runs one experiment; returns the exit status."""
  config, resume = context.config, flags.FLAGS.resume
  evaluation = config.evaluation
  if math.isfinite(evaluation.solved_return) and (
    evaluation.evaluation_period_s == 0
  ):
    raise errors.UserError(
      f'solved_return ({evaluation.solved_return:g}) must come with '
      'evaluation_period_s > 0, or nothing measures it'
    )
  if resume and context.run_dir is None:
    raise errors.UserError('resume (True) must come with --run_dir')
  named = interpreters.given()
  commands = interpreters.resolve(
    named, replay_client=config.replay.replay_client
  )
  run_dir = context.run_dir or experiment.default_run_dir(config.environment)
  is_new = not run_dir.exists()
  lock = experiment.prepare_run_dir(run_dir, config, resume=resume)
  print(f'run_dir: {run_dir}', flush=True)
  if resume and not experiment.has_checkpoint(run_dir):
    print(
      'There is no learner checkpoint to resume from: training starts '
      'from the beginning.',
      flush=True,
    )
  *ports, coordinator_port = topology.pick_free_ports(
    config.replay.num_servers + 1
  )
  topology.write(run_dir, [f'localhost:{port}' for port in ports])
  # Of the part of the run before: its columns may have been others.
  (run_dir / columns.FILE).unlink(missing_ok=True)
  with lock:
    status = experiment.Experiment(
      config=config,
      run_dir=pathlib.Path(run_dir),
      specs=experiment.make_specs(
        config,
        run_dir,
        ports,
        coordinator_port=coordinator_port,
        interpreters=commands,
        columns_file=metrics.REPLAY_SERVER in named,
        replay_restore=flags.FLAGS.replay_restore,
      ),
      stop=context.stop,
      progress=context.watchdog.progress,
      resumed=resume,
      resume_flags=interpreters.as_flags(named),
    ).run()
    if status == 2 and not resume and not experiment.has_begun(run_dir):
      experiment.give_up_run_dir(run_dir, is_new=is_new)
  return status


def main() -> None:
  """Entry point."""
  app.run(run_local, role='local', stop_deadline_s=9.9)


if __name__ == '__main__':
  main()
