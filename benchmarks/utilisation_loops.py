"""One loop of `benchmarks.utilisation` in one process; run by it.

  python -m benchmarks.utilisation_loops --loop=serial --seconds=60 ...

plays a batch of episodes, updates on it, and begins anew with the new params:
engine, environments, packer and compiled update are those of actors and
learners. It prints one JSON line after each update and one at the end.

  serial     one environment steps at a time: every wait of a tool is waited
             for by all
  batched    all environments at once in threads; the slowest is waited for,
             then come as many updates as there are batches
  swift      as serial, of the task without waits: what serial would have
             learnt after as many updates, as waits change no token. At the end
             it plays without learning, to see what playing alone costs
  score      plays new tasks with what --trained_run has learnt
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time

from absl import flags
import numpy as np

from launch import app

SLOW = 'tool:benchmarks.slow_lookup:SlowLookup'
SWIFT = 'tool:benchmarks.slow_lookup:SwiftLookup'
LOOPS = ('serial', 'batched', 'swift', 'score')

flags.DEFINE_enum('loop', None, LOOPS, 'What to run.')
flags.DEFINE_float('seconds', 0.0, 'Wall time to run for, seconds; 0: no limit')
flags.DEFINE_string('trained_run', '', 'Run directory, for --loop=score.')
flags.DEFINE_integer('updates', 0, 'Updates after which to end; 0: no limit')

_EVALUATION_EPISODES = 512
_PLAYED_EPISODES = 512  # To measure playing alone on.


def evaluate(
  context: app.RoleContext, config, agent, params
) -> dict[str, float]:
  """Scores of `params` on tasks that nobody trained on, without waits."""
  from tunix_reverb import types

  evaluation = dataclasses.replace(
    config.evaluation, evaluation_episodes=_EVALUATION_EPISODES
  )
  evaluator = agent.make_evaluator(
    dataclasses.replace(config, environment=SWIFT, evaluation=evaluation)
  )
  try:
    evaluator.set_variables(types.Variables(1, params))
    result = evaluator.evaluate(on_progress=context.watchdog.progress)
  finally:
    evaluator.close()
  returns = result.returns
  return {
    'score': float(returns.mean()),
    'score_error': float(returns.std() / np.sqrt(returns.size)),
  }


def _train(context: app.RoleContext, config, loop: str) -> dict[str, float]:
  """Runs `loop` for the time or the updates that the flags say."""
  from benchmarks import utilisation_trainer

  num, size = (
    config.actor.environments_per_actor,
    config.trajectories_per_update,
  )
  trainer = utilisation_trainer.Trainer(
    config,
    num_environments={
      'serial': config.transformer.group_size,
      'batched': num,
      'swift': size,
    }[loop],
    episodes=num if loop == 'batched' else size,
    on_progress=context.watchdog.progress,
  )
  learner, player = trainer.learner, trainer.player
  learner.report.take()
  player.loop.account.take()
  start_s, start_cpu_s = time.monotonic(), time.process_time()
  elapsed_s = 0.0
  while not _is_over(learner.learner_step, elapsed_s):
    learner.step()
    elapsed_s = time.monotonic() - start_s
    _print_update(learner.learner_step, elapsed_s, trainer.take_returns())
  cpu_s = time.process_time() - start_cpu_s
  report, player_time = learner.report.take(), player.loop.account.take()
  row = {
    'wall_s': elapsed_s,
    'cpu_s': cpu_s,
    'updates': learner.learner_step,
    'tokens': trainer.tokens,
    'compute': report['utilisation_compute'],
    'publishing': report['utilisation_publishing'],
    'tools': player_time['environment'],
    'generation': player_time['act'],
    'policy_lag_mean': report['policy_lag_mean'],
    'policy_lag_max': report['policy_lag_max'],
    'batch_fill': report['batch_fill'],
    'dropped': sum(trainer.drops.by_cause().values()),
  }
  if loop == 'swift':
    row |= player.measure(_PLAYED_EPISODES)
  player.close()
  params = learner.get_variables()[0]
  return row | evaluate(context, config, trainer.agent, params)


def _is_over(updates: int, elapsed_s: float) -> bool:
  given = flags.FLAGS
  return 0 < given.updates <= updates or 0 < given.seconds <= elapsed_s


def _print_update(updates: int, elapsed_s: float, returns: list[float]) -> None:
  print(
    json.dumps(
      {
        'elapsed_s': elapsed_s,
        'learner_step': updates,
        'return': float(np.mean(returns)),
      }
    ),
    flush=True,
  )


def _score(context: app.RoleContext, config) -> dict[str, float]:
  """Scores of the newest checkpoint of --trained_run, and its step."""
  from tunix_reverb.agents import builder

  run_dir = pathlib.Path(flags.FLAGS.trained_run)
  agent = builder.make_agent(config)
  variables = builder.load_variables(config, agent, run_dir)
  names = [path.name for path in builder.checkpoint_dir(run_dir).iterdir()]
  steps = [int(name) for name in names if name.isdecimal()]
  scores = evaluate(context, config, agent, variables.params)
  return scores | {'learner_step': max(steps)}


def measure(context: app.RoleContext) -> int:
  """Runs the loop that the flags name and prints its figures."""
  loop = flags.FLAGS.loop
  config = context.config
  if loop == 'serial':
    actor = dataclasses.replace(config.actor, environment_mode='vectorised')
    config = dataclasses.replace(config, actor=actor)
  environment = SLOW if loop in ('serial', 'batched') else SWIFT
  config = dataclasses.replace(
    config,
    environment=environment,
    learner=dataclasses.replace(config.learner, publish_period=1),
  )
  if loop == 'score':
    row = _score(context, config)
  else:
    row = _train(context, config, loop)
  print(json.dumps({'loop': loop, **row}), flush=True)
  context.watchdog.close()
  return 0


def main() -> None:
  """Entry point."""
  app.run(measure, role='utilisation_loops', single_threaded_xla=True)


if __name__ == '__main__':
  main()
