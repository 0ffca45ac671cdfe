"""The agent of a transformer: V-trace over tokens, sharded over a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

from dm_env import specs as dm_specs
import jax

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import token_policy
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.environments import factory
from tunix_reverb.learner import objectives
from tunix_reverb.networks.transformer import config as model_config
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.networks.transformer import presets
from tunix_reverb.replay import token_adder

_OBSERVATION = {'token', 'loss_mask', 'turn_id'}


@dataclasses.dataclass(frozen=True)
class TransformerAgent(agent_lib.Agent):
  """See base class.

  Attributes:
    environment: specs of one environment.
    model: what the transformer is.
    columns: `specs.ColumnSpec` of every column of an item.
  """

  environment: specs.EnvironmentSpec
  model: model_config.TransformerConfig
  columns: types.Trajectories

  def make_policy(
    self,
    config: config_lib.ExperimentConfig,
    *,
    num_environments: int,
    seed: int,
    greedy: bool = False,
    independent: bool = False,
  ) -> token_policy.TokenPolicy:
    del independent  # It always is.
    return token_policy.TokenPolicy(
      self.model,
      num_environments=num_environments,
      max_length=config.actor.trajectory_length + 1,
      dtype=config.transformer.compute_dtype,
      seed=seed,
      greedy=greedy,
    )

  def make_adder(self, **kwargs: Any) -> token_adder.TokenAdder:
    return token_adder.TokenAdder(columns=self.columns, **kwargs)

  def make_objective(
    self, config: config_lib.ExperimentConfig, mesh: jax.sharding.Mesh
  ) -> objectives.Objective:
    compute = model_config.ComputeConfig(
      dtype=config.transformer.compute_dtype, remat=config.transformer.remat
    )
    return objectives.token_objective(
      model_lib.make_transformer(
        self.model,
        mesh,
        compute,
        temperature=config.transformer.temperature,
      ),
      agent_lib.loss_config(config.learner),
      ratio=config.transformer.importance_ratio,
    )


def make_agent(config: config_lib.ExperimentConfig) -> TransformerAgent:
  """Makes one environment to read its specs.

  Raises:
    errors.UserError: it is not an environment of tokens.
  """
  environment_spec = factory.environment_spec(
    config.environment, seed=config.seed
  )
  observation, action = environment_spec.observation, environment_spec.action
  if (
    not isinstance(observation, dict)
    or observation.keys() != _OBSERVATION
    or not isinstance(action, dm_specs.DiscreteArray)
  ):
    raise errors.UserError(
      f'environment ({config.environment!r}) must be one of tokens with agent '
      'transformer, such as tokens:reverse: it observes '
      f'{", ".join(sorted(_OBSERVATION))}, and its action is the next token'
    )
  model = dataclasses.replace(
    presets.get(config.transformer.model), vocabulary_size=action.num_values
  )
  # What is stored of the observation is the token alone.
  columns = specs.trajectories_spec(
    environment_spec._replace(observation=specs.stored_action_spec(action)),
    has_turns=True,
  )
  return TransformerAgent(environment_spec, model, columns)
