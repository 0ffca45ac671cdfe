"""The agent of a policy network: V-trace over transitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import evaluation
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents.vtrace import acting
from tunix_reverb.environments import factory
from tunix_reverb.learner import objectives
from tunix_reverb.networks import policy_network


@dataclasses.dataclass(frozen=True)
class VTraceAgent(agent_lib.Agent):
  """See base class.

  Attributes:
    network: the policy network.
    columns: `specs.ColumnSpec` of every column of an item.
  """

  network: policy_network.PolicyNetwork
  columns: types.Trajectories

  def make_acting(
    self, config: config_lib.ExperimentConfig, **kwargs: Any
  ) -> agent_lib.Acting:
    return acting.make_acting(config, self.network, self.columns, **kwargs)

  def make_evaluator(
    self, config: config_lib.ExperimentConfig
  ) -> evaluation.Evaluator:
    return acting.make_evaluator(config, self.network)

  def make_objective(
    self, config: config_lib.ExperimentConfig, mesh: jax.sharding.Mesh
  ) -> objectives.Objective:
    del mesh
    return objectives.policy_objective(
      self.network, agent_lib.loss_config(config.learner)
    )


def make_agent(config: config_lib.ExperimentConfig) -> VTraceAgent:
  """Makes one environment to read its specs, and the network for them."""
  environment_spec = factory.environment_spec(
    config.environment, seed=config.seed
  )
  network = policy_network.make_policy_network(
    environment_spec,
    torso=config.network.torso,
    hidden_sizes=config.network.hidden_sizes,
    core=config.network.core,
    core_size=config.network.core_size,
  )
  columns = specs.trajectories_spec(environment_spec, network.core_state_spec())
  return VTraceAgent(network, columns)
