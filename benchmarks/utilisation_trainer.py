"""A synchronous trainer of the parts of actors and learners, in one thread.

Imports JAX: only after `launch.app` has set what must be set before.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import time

import numpy as np

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import permit_line
from tunix_reverb.actor import turn_loop
from tunix_reverb.agents import builder
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents.transformer import acting
from tunix_reverb.agents.transformer import agent as agent_lib
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.environments import factory
from tunix_reverb.sharding import mesh as mesh_lib

_STEP_TIMEOUT_S = 1.0


class Handover(core.VariableSource):
  """The learner's publisher and the actor's source of variables in one."""

  idle = True

  def __init__(self) -> None:
    self._variables: types.Variables | None = None

  def offer(self, variables: types.Variables) -> None:
    """Takes what the learner publishes."""
    self._variables = variables

  def get_variables(
    self, min_version: int = 0, timeout_s: float = 0.0
  ) -> types.Variables | None:
    """See base class; does not wait."""
    del timeout_s
    variables = self._variables
    if variables is None or variables.policy_version < min_version:
      return None
    return variables


class _Played:
  """Stands in for an adder: keeps what was played, by groups."""

  def __init__(self) -> None:
    self.groups: list[types.Trajectories] = []

  def add(self, trajectories: types.Trajectories) -> None:
    self.groups.append(trajectories)

  def send_due(self) -> None:
    pass

  def flush(self) -> None:
    pass


class Player:
  """An engine and environments that play as many episodes as they are asked."""

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    agent: agent_lib.TransformerAgent,
    *,
    num_environments: int,
    on_progress: Callable[[], None],
  ):
    """Makes the environments and compiles the engine.

    Args:
      config: of the run.
      agent: of it.
      num_environments: that play at once.
      on_progress: called as turns of the policy end.
    """
    self._group_size = config.transformer.group_size
    self._on_progress = on_progress
    self._permits = permit_line.OwnPermits(limit=0)
    self._played = _Played()
    self._environment = factory.make_vector(
      config.environment,
      num_environments=num_environments,
      mode=config.actor.environment_mode,
      seed=config.seed + 1,
      timeout_s=config.actor.environment_timeout_s,
      turn_options=agent.play.options,
    )
    self.variables = Handover()
    self.loop = self._make_loop(config, agent, num_environments)

  def _make_loop(self, config, agent, num_slots: int) -> turn_loop.TurnLoop:
    return turn_loop.TurnLoop(
      environment=self._environment,
      engine=acting.make_engine(
        config, agent.play, agent.model, num_slots=num_slots
      ),
      adder=self._played,
      variables=self.variables,
      variable_update_period_s=0.0,
      permits=self._permits,
      config=turn_loop.TurnConfig(
        max_turn_tokens=agent.play.max_turn_tokens,
        token_dtype=agent.columns.action.dtype,
        seed=config.seed + 1,
        group_size=config.transformer.group_size,
        advantage=config.transformer.advantage,
      ),
    )

  def play(self, num_episodes: int) -> list[types.Trajectories]:
    """Plays so many to their end; trajectories by group."""
    num_groups = num_episodes // self._group_size
    self._permits.allow(num_groups)
    while len(self._played.groups) < num_groups:
      steps = self.loop.actor_steps
      self.loop.step(_STEP_TIMEOUT_S)
      if self.loop.actor_steps > steps:
        self._on_progress()
    groups, self._played.groups = self._played.groups, []
    return groups

  def measure(self, num_episodes: int) -> dict[str, float]:
    """Rates of playing alone, by the params learnt last."""
    cpu_s, start_s = time.process_time(), time.monotonic()
    groups = self.play(num_episodes)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - start_s
    tokens = sum(int(group.lengths.sum()) for group in groups)
    sampled = sum(int(group.loss_mask.sum()) for group in groups)
    return {
      'playing_tokens_per_cpu_s': tokens / cpu_s,
      'playing_episodes_per_s': num_episodes / wall_s,
      'playing_tokens_per_sampled': tokens / sampled,
    }

  def close(self) -> None:
    self._environment.close()
    self.loop.close()


class Trainer:
  """Plays and learns in turns."""

  def __init__(
    self,
    config: config_lib.ExperimentConfig,
    *,
    num_environments: int,
    episodes: int,
    on_progress: Callable[[], None],
  ):
    """Compiles everything and publishes the first params.

    Args:
      config: of the run.
      num_environments: that play at once.
      episodes: of a round, before its updates.
      on_progress: called as turns of the policy end.
    """
    self._episodes = episodes
    self._size = config.trajectories_per_update
    self._returns: list[float] = []
    self.tokens = 0
    self.agent = builder.make_agent(config)
    self._parts = builder.make_learner_parts(config, self.agent)
    self.player = Player(
      config,
      self.agent,
      num_environments=num_environments,
      on_progress=on_progress,
    )
    self._packer = packer_lib.Packer(
      buckets=self._parts.buckets,
      columns=self.agent.columns,
      window=config.batch.packing_window,
    )
    self.drops = builder.make_drop_counter()
    self.learner = builder.make_learner(
      config,
      self._parts,
      batches=self._batches(),
      drops=self.drops,
      publisher=self.player.variables,
    )
    self.learner.publish()

  def take_returns(self) -> list[float]:
    """Of the episodes that were packed since the last call."""
    returns, self._returns = self._returns, []
    return returns

  def _batches(self) -> Iterator[types.PackedBatch]:
    """Plays a round; then a batch for each update on it."""
    while True:
      groups = self.player.play(self._episodes)
      per_update = self._size // groups[0].lengths.size
      for begin in range(0, len(groups), per_update):
        yield self._pack(groups[begin : begin + per_update])

  def _pack(self, groups: list[types.Trajectories]) -> types.PackedBatch:
    """All of `groups`, on the device."""
    for group in groups:
      self._packer.add(group)
      self._returns += _returns(group)
      self.tokens += int(group.lengths.sum())
    packed = self._packer.pop(flush=True)
    if packed is None or self._packer.pending_positions:
      raise AssertionError('batch_positions must hold a whole update')
    batch = mesh_lib.place_batch(
      packed.batch, self._parts.mesh, self._parts.batch_spec
    )
    return dataclasses.replace(packed, batch=batch)


def _returns(group: types.Trajectories) -> list[float]:
  ends = np.cumsum(group.lengths)
  return [float(part.sum()) for part in np.split(group.reward, ends[:-1])]
