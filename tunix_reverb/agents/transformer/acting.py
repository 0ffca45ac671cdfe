"""Actors and evaluators of a transformer, which plays turns of tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
from typing import Any

from dm_env import specs as dm_specs
import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import engine as engine_lib
from tunix_reverb.actor import evaluation
from tunix_reverb.actor import permit_line
from tunix_reverb.actor import remote_engine
from tunix_reverb.actor import turn_evaluation
from tunix_reverb.actor import turn_loop
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents.transformer import config as transformer_config
from tunix_reverb.environments import factory
from tunix_reverb.environments import turn_factory
from tunix_reverb.environments import turns
from tunix_reverb.environments.tools import statistics
from tunix_reverb.environments.tools import task as task_lib
from tunix_reverb.networks.transformer import config as model_config
from tunix_reverb.replay import token_adder
from tunix_reverb.text import characters
from tunix_reverb.text import tokeniser


@dataclasses.dataclass(frozen=True, kw_only=True)
class Play:
  """How the environment is played.

  Attributes:
    environment: its specs.
    options: what its copies are made with.
    stop_tokens: any of them ends a turn.
    chat_format: in which conversations are written; None if only the
      environment knows.
    max_turn_tokens: of a turn.
    vocabulary_size: of observations and actions.
  """

  environment: specs.EnvironmentSpec
  options: turn_factory.TurnOptions
  stop_tokens: tuple[int, ...]
  chat_format: tokeniser.ChatFormat | None
  max_turn_tokens: int
  vocabulary_size: int

  def columns(self) -> types.Trajectories:
    """`specs.ColumnSpec` of every column of an item."""
    return specs.trajectories_spec(
      turns.stored_spec(self.environment),
      has_turns=True,
      has_advantage=self.options.group_size > 1,
    )


def make_play(
  config: config_lib.ExperimentConfig,
  chat_format: tokeniser.ChatFormat | None = None,
) -> Play:
  """Makes one environment to read what it is.

  Args:
    config: of the run.
    chat_format: of the policy's model; None for models from scratch.

  Raises:
    errors.UserError: it is no turn environment.
  """
  options = turn_factory.TurnOptions(
    chat_format=chat_format, group_size=config.transformer.group_size
  )
  if config.environment == transformer_config.OUTSIDE:
    return _outside(config, options)
  environment = factory.load(
    config.environment, seed=config.seed, turn_options=options
  )
  try:
    action = environment.action_spec()
    if not turns.is_turn(action):
      raise errors.UserError(
        f'environment ({config.environment!r}) must be one of turns with '
        'agent transformer, such as tool:lookup: its observations and actions '
        'are padded tokens'
      )
    limits = getattr(environment, 'limits', None)
    if limits is not None:
      limits = _limits(config, limits)
      action = turns.action_spec(
        limits.max_turn_tokens, turns.vocabulary_size(action)
      )
    own_format = getattr(environment, 'chat_format', None)
    return Play(
      environment=specs.make_environment_spec(environment),
      options=dataclasses.replace(options, limits=limits),
      stop_tokens=() if own_format is None else own_format.stop_tokens,
      chat_format=own_format,
      max_turn_tokens=action.shape[0],
      vocabulary_size=turns.vocabulary_size(action),
    )
  finally:
    environment.close()


def _outside(
  config: config_lib.ExperimentConfig, options: turn_factory.TurnOptions
) -> Play:
  """How agents outside play: up to what a trajectory holds."""
  chat_format = options.chat_format or characters.CharacterFormat()
  length = config.actor.trajectory_length + 1
  most = config.transformer.max_turn_tokens or length
  size = chat_format.tokeniser.vocabulary_size
  return Play(
    environment=specs.EnvironmentSpec(
      observation=turns.observation_spec(length, size),
      action=turns.action_spec(most, size),
      reward=dm_specs.Array((), np.float32, name='reward'),
      discount=dm_specs.BoundedArray((), np.float32, 0, 1, name='discount'),
    ),
    options=options,
    stop_tokens=chat_format.stop_tokens,
    chat_format=chat_format,
    max_turn_tokens=most,
    vocabulary_size=size,
  )


def _limits(
  config: config_lib.ExperimentConfig, limits: task_lib.Limits
) -> task_lib.Limits:
  """The task's limits with what the config changes."""
  settings = config.transformer
  return dataclasses.replace(
    limits,
    max_turns=settings.max_turns or limits.max_turns,
    max_turn_tokens=settings.max_turn_tokens or limits.max_turn_tokens,
    max_tokens=min(limits.max_tokens, config.actor.trajectory_length + 1),
  )


def make_acting(
  config: config_lib.ExperimentConfig,
  play: Play,
  model: model_config.TransformerConfig,
  *,
  actor_id: int,
  writer: core.ItemWriter,
  variables: core.VariableSource,
  permits: core.PermitSource | None = None,
  keep_waiting: Callable[[], bool] = lambda: True,
) -> agent_lib.Acting:
  """See `agent.Agent.make_acting`."""
  seed = agent_lib.actor_seed(config, actor_id)
  num = config.actor.environments_per_actor
  tools = statistics.ToolStatistics()
  environment = factory.make_vector(
    config.environment,
    num_environments=num,
    mode=config.actor.environment_mode,
    seed=seed,
    timeout_s=config.actor.environment_timeout_s,
    turn_options=dataclasses.replace(play.options, on_episode=tools.add),
  )
  return make_loop(
    config,
    play,
    environment=environment,
    engine=_make_actor_engine(config, play, model, num),
    actor_id=actor_id,
    writer=writer,
    variables=variables,
    permits=permits,
    keep_waiting=keep_waiting,
    environment_metrics=tools.metrics,
  )


def make_loop(
  config: config_lib.ExperimentConfig,
  play: Play,
  *,
  environment: core.VectorEnvironment,
  engine: engine_lib.Engine,
  actor_id: int,
  writer: core.ItemWriter,
  variables: core.VariableSource,
  permits: core.PermitSource | None = None,
  keep_waiting: Callable[[], bool] = lambda: True,
  kind: type[turn_loop.TurnLoop] = turn_loop.TurnLoop,
  environment_metrics: Callable[[], Mapping[str, float]] = dict,
) -> agent_lib.Acting:
  """The loop of `environment` and `engine`; see `make_acting`."""
  columns = play.columns()
  adder = token_adder.TokenAdder(
    writer=writer,
    item_transitions=agent_lib.item_transitions(config, columns),
    item_age_s=config.actor.item_age_s,
    keep_waiting=keep_waiting,
  )
  loop = kind(
    environment=environment,
    engine=engine,
    adder=adder,
    variables=variables,
    variable_update_period_s=config.actor.variable_update_period_s,
    permits=permits or permit_line.OwnPermits(),
    config=turn_loop.TurnConfig(
      max_turn_tokens=play.max_turn_tokens,
      token_dtype=columns.action.dtype,
      seed=agent_lib.actor_seed(config, actor_id),
      actor_id=actor_id,
      group_size=config.transformer.group_size,
      advantage=config.transformer.advantage,
      # So that a synchronous run comes out the same every time.
      in_turn=permits is not None and config.staleness.max_policy_lag == 0,
    ),
    environment_metrics=environment_metrics,
  )
  return agent_lib.Acting(loop, adder, environment)


def _make_actor_engine(
  config: config_lib.ExperimentConfig,
  play: Play,
  model: model_config.TransformerConfig,
  num_slots: int,
) -> Any:
  """This process's engine, or one that is somebody else's server."""
  url = config.transformer.policy_url
  if not url:
    return make_engine(config, play, model, num_slots=num_slots)
  return remote_engine.RemoteEngine(
    url,
    num_slots=num_slots,
    max_length=config.actor.trajectory_length + 1,
    stop_tokens=play.stop_tokens,
    temperature=config.transformer.temperature,
    timeout_s=config.replay.permit_lease_s,
  )


def make_engine(
  config: config_lib.ExperimentConfig,
  play: Play,
  model: model_config.TransformerConfig,
  *,
  num_slots: int,
  greedy: bool = False,
) -> engine_lib.Engine:
  """The engine that plays `num_slots` episodes at once."""
  return engine_lib.Engine(
    **engine_settings(config, play, model, num_slots), greedy=greedy
  )


def engine_settings(
  config: config_lib.ExperimentConfig,
  play: Play,
  model: model_config.TransformerConfig,
  num_slots: int,
) -> dict[str, Any]:
  """Arguments of an `Engine` that plays `num_slots` episodes at once."""
  return {
    'config': model,
    'num_slots': num_slots,
    'max_length': config.actor.trajectory_length + 1,
    'dtype': config.transformer.compute_dtype,
    'stop_tokens': play.stop_tokens,
    'temperature': config.transformer.temperature,
  }


def make_evaluator(
  config: config_lib.ExperimentConfig,
  play: Play,
  model: model_config.TransformerConfig,
) -> evaluation.Evaluator:
  """See `agent.Agent.make_evaluator`."""
  num_episodes = config.evaluation.evaluation_episodes
  num = min(num_episodes, config.actor.environments_per_actor)
  transcripts = turn_evaluation.Transcripts()
  options = dataclasses.replace(
    play.options, group_size=1, on_episode=transcripts.add
  )
  environment = factory.make_vector(
    config.environment,
    num_environments=num,
    mode=config.actor.environment_mode,
    seed=agent_lib.evaluator_seed(config),
    timeout_s=config.actor.environment_timeout_s,
    turn_options=options,
  )
  engine = make_engine(
    config,
    play,
    model,
    num_slots=num,
    greedy=not config.transformer.evaluate_sampled,
  )
  return turn_evaluation.TurnEvaluator(
    environment,
    engine,
    transcripts,
    num_episodes=num_episodes,
    config=turn_loop.TurnConfig(
      max_turn_tokens=play.max_turn_tokens,
      token_dtype=np.dtype(np.int32),
      seed=agent_lib.evaluator_seed(config),
    ),
  )
