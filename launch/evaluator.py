"""Plays evaluation episodes: beside training, or of a checkpoint.

With --checkpoint=<run_dir> it plays once, prints mean, spread and episode
count, and ends. Without, it follows the variables of a live run.
"""

from __future__ import annotations

import pathlib
import time

from absl import flags

from launch import app
from launch import topology

flags.DEFINE_string(
  'checkpoint',
  None,
  'A run directory, or its checkpoints/learner, to evaluate once.',
)


def run_evaluator(context: app.RoleContext) -> int:
  """Evaluates a checkpoint, or a live run until told to stop."""
  from tunix_reverb.agents import builder

  agent = builder.make_agent(context.config)
  evaluator = agent.make_evaluator(context.config)
  try:
    if flags.FLAGS.checkpoint:
      return _evaluate_checkpoint(context, agent, evaluator)
    _follow(context, evaluator)
    return 0
  finally:
    evaluator.close()


def _evaluate(context, evaluator):
  """Plays one evaluation and keeps its transcripts; None if stopped."""
  from tunix_reverb.telemetry import transcripts

  result = evaluator.evaluate(
    keep_going=lambda: not context.stop.is_set(),
    on_progress=context.watchdog.progress,
  )
  if result is not None:
    transcripts.write(
      context.run_dir, result.transcripts, result.policy_version
    )
  return result


def _evaluate_checkpoint(context, agent, evaluator) -> int:
  from tunix_reverb.agents import builder

  directory = pathlib.Path(flags.FLAGS.checkpoint)
  variables = builder.load_variables(context.config, agent, directory)
  evaluator.set_variables(variables)
  print(
    f'evaluator: playing {context.config.evaluation.evaluation_episodes} '
    f'episodes of {context.config.environment} with version '
    f'{variables.policy_version} from {directory}',
    flush=True,
  )
  result = _evaluate(context, evaluator)
  if result is None:
    print('evaluator: stopped before the last episode', flush=True)
    return 1
  print(result.describe())
  return 0


def _follow(context, evaluator) -> None:
  """Evaluates the newest variables of a live run, again and again."""
  from tunix_reverb.replay import clients

  address = topology.replay_servers(
    flags.FLAGS.replay_servers, context.run_dir
  )[0]
  period_s = context.config.evaluation.evaluation_period_s
  variables = clients.make_variable_source(
    address, period_s=period_s, client=context.config.replay.replay_client
  )
  try:
    while not context.stop.is_set():
      with context.watchdog.waiting(
        f'{context.role} waits for newer variables of {address}'
      ):
        newer = variables.get_variables(evaluator.policy_version + 1, 0.5)
      if newer is None:
        continue
      began_s = time.monotonic()
      evaluator.set_variables(newer)
      result = _evaluate(context, evaluator)
      if result is None:
        return
      context.logger.write(result.metrics(), result.policy_version)
      context.stop.wait(max(0.0, period_s - (time.monotonic() - began_s)))
  finally:
    variables.close()


def main() -> None:
  """Entry point."""
  app.run(run_evaluator, role='evaluator', single_threaded_xla=True)


if __name__ == '__main__':
  main()
