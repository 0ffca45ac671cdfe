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

import collections
from collections.abc import Iterator
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
_STEP_TIMEOUT_S = 1.0


class _Handover:
  """The learner's publisher and the actor's source of variables in one."""

  idle = True

  def __init__(self):
    self._variables = None

  def offer(self, variables) -> None:
    """Takes what the learner has published."""
    import jax

    # A copy: the next update overwrites the learner's buffers.
    params = jax.tree_util.tree_map(np.array, variables.params)
    self._variables = dataclasses.replace(variables, params=params)

  def get_variables(self, min_version: int = 0, timeout_s: float = 0.0):
    """As of `core.VariableSource`."""
    del timeout_s
    variables = self._variables
    if variables is None or variables.policy_version < min_version:
      return None
    return variables


class _Played:
  """Stands in for an adder: keeps what was played, by groups."""

  def __init__(self):
    self.groups: collections.deque = collections.deque()

  def add(self, trajectories) -> None:
    self.groups.append(trajectories)

  def send_due(self) -> None:
    pass

  def flush(self) -> None:
    pass


class Player:
  """An engine and environments that play as many episodes as they are asked."""

  def __init__(self, config, agent, variables, *, num: int):
    """Args: config: of the run; agent: its own; variables: where new ones come
    from; num: environments."""
    from tunix_reverb.actor import permit_line
    from tunix_reverb.actor import turn_loop
    from tunix_reverb.agents.transformer import acting
    from tunix_reverb.environments import factory

    play, settings = agent.play, config.transformer
    self._environment = factory.make_vector(
      config.environment,
      num_environments=num,
      mode=config.actor.environment_mode,
      seed=config.seed + 1,
      timeout_s=config.actor.environment_timeout_s,
      turn_options=play.options,
    )
    self.engine = acting.make_engine(config, play, agent.model, num_slots=num)
    self._permits = permit_line.OwnPermits(limit=0)
    self._played = _Played()
    self._group_size = settings.group_size
    self.loop = turn_loop.TurnLoop(
      environment=self._environment,
      engine=self.engine,
      adder=self._played,
      variables=variables,
      variable_update_period_s=0.0,
      permits=self._permits,
      config=turn_loop.TurnConfig(
        max_turn_tokens=play.max_turn_tokens,
        token_dtype=agent.columns.action.dtype,
        seed=config.seed + 1,
        group_size=settings.group_size,
        advantage=settings.advantage,
      ),
    )

  def play(self, num_episodes: int) -> list:
    """Plays so many to their end; trajectories by group."""
    num_groups = num_episodes // self._group_size
    self._permits.allow(num_groups)
    while len(self._played.groups) < num_groups:
      self.loop.step(_STEP_TIMEOUT_S)
    groups = list(self._played.groups)
    self._played.groups.clear()
    return groups

  def close(self) -> None:
    self._environment.close()
    self.loop.close()


class Trainer:
  """Plays and learns in turns, in one thread."""

  def __init__(self, config, *, num_environments: int, episodes: int):
    """Args: config: of the run. num_environments: that play at once. episodes:
    of a round, before its updates."""
    from tunix_reverb.agents import builder
    from tunix_reverb.batching import packer as packer_lib

    self._episodes = episodes
    self._size = config.trajectories_per_update
    self.agent = builder.make_agent(config)
    self.parts = builder.make_learner_parts(config, self.agent)
    self.handover = _Handover()
    self.player = Player(
      config, self.agent, self.handover, num=num_environments
    )
    self._packer = packer_lib.Packer(
      buckets=self.parts.buckets,
      columns=self.agent.columns,
      window=config.batch.packing_window,
    )
    self._returns: list[float] = []
    self.tokens = 0
    self.learner = builder.make_learner(
      config,
      self.parts,
      batches=self._batches(),
      drops=builder.make_drop_counter(),
      publisher=self.handover,
    )
    self.learner.publish()

  def take_returns(self) -> list[float]:
    """Of the episodes that were packed since the last call."""
    returns, self._returns = self._returns, []
    return returns

  def _batches(self) -> Iterator:
    """Plays a round; then a batch for each update on it."""
    from tunix_reverb.sharding import mesh as mesh_lib

    while True:
      groups = self.player.play(self._episodes)
      per_update = self._size // len(groups[0].lengths)
      for begin in range(0, len(groups), per_update):
        for group in groups[begin : begin + per_update]:
          self._packer.add(group)
          self._returns += _returns(group)
          self.tokens += int(group.lengths.sum())
        packed = self._packer.pop(flush=True)
        if self._packer.pending_positions:
          raise AssertionError('batch_positions must hold a whole update')
        batch = mesh_lib.place_batch(
          packed.batch, self.parts.mesh, self.parts.batch_spec
        )
        yield dataclasses.replace(packed, batch=batch)


def _returns(group) -> list[float]:
  ends = np.cumsum(group.lengths)
  return [float(part.sum()) for part in np.split(group.reward, ends[:-1])]


def evaluate(config, agent, params) -> dict[str, float]:
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
    result = evaluator.evaluate()
  finally:
    evaluator.close()
  returns = result.returns
  return {
    'score': float(returns.mean()),
    'score_error': float(returns.std() / np.sqrt(returns.size)),
  }


def _train(config, loop: str) -> dict[str, float]:
  """Runs `loop` for the time or the updates that the flags say."""
  num, size = (
    config.actor.environments_per_actor,
    config.trajectories_per_update,
  )
  trainer = Trainer(
    config,
    num_environments={
      'serial': config.transformer.group_size,
      'batched': num,
      'swift': size,
    }[loop],
    episodes=num if loop == 'batched' else size,
  )
  learner, player = trainer.learner, trainer.player
  learner.account.take()
  player.loop.account.take()
  start_s, start_cpu_s = time.monotonic(), time.process_time()
  elapsed_s = 0.0
  while not _is_over(learner.learner_step, elapsed_s):
    learner.step()
    elapsed_s = time.monotonic() - start_s
    _print_update(learner.learner_step, elapsed_s, trainer.take_returns())
  cpu_s = time.process_time() - start_cpu_s
  learner_time = learner.account.take()
  player_time = player.loop.account.take()
  row = {
    'wall_s': elapsed_s,
    'cpu_s': cpu_s,
    'updates': learner.learner_step,
    'tokens': trainer.tokens,
    'compute': learner_time['compute'],
    'tools': player_time['environment'],
    'generation': player_time['act'],
  }
  if loop == 'swift':
    row |= _measure_playing(player)
  player.close()
  return row | evaluate(config, trainer.agent, learner.get_variables()[0])


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


def _measure_playing(player: Player) -> dict[str, float]:
  """Rates of playing alone, by the params learnt last."""
  cpu_s, start_s = time.process_time(), time.monotonic()
  groups = player.play(_PLAYED_EPISODES)
  cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - start_s
  tokens = sum(int(group.lengths.sum()) for group in groups)
  sampled = sum(int(group.loss_mask.sum()) for group in groups)
  return {
    'playing_tokens_per_cpu_s': tokens / cpu_s,
    'playing_episodes_per_s': _PLAYED_EPISODES / wall_s,
    'playing_tokens_per_sampled': tokens / sampled,
  }


def _score(config) -> dict[str, float]:
  """Scores of the newest checkpoint of --trained_run, and its step."""
  from tunix_reverb.agents import builder

  run_dir = pathlib.Path(flags.FLAGS.trained_run)
  agent = builder.make_agent(config)
  variables = builder.load_variables(config, agent, run_dir)
  steps = [int(p.name) for p in builder.checkpoint_dir(run_dir).iterdir()]
  scores = evaluate(config, agent, variables.params)
  return scores | {'learner_step': max(steps)}


def measure(context: app.RoleContext) -> int:
  """Runs the loop that the flags name and prints its figures."""
  loop = flags.FLAGS.loop
  config = context.config
  if loop == 'serial':
    actor = dataclasses.replace(config.actor, environment_mode='vectorised')
    config = dataclasses.replace(config, actor=actor)
  environment = SLOW if loop in ('serial', 'batched') else SWIFT
  config = dataclasses.replace(config, environment=environment)
  row = _score(config) if loop == 'score' else _train(config, loop)
  print(json.dumps({'loop': loop, **row}), flush=True)
  context.watchdog.close()
  return 0


def main() -> None:
  """Entry point."""
  app.run(measure, role='utilisation_loops', single_threaded_xla=True)


if __name__ == '__main__':
  main()
