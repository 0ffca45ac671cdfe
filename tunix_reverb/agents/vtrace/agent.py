"""The agent of a policy network: V-trace over transitions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.environments import factory
from tunix_reverb.learner import objectives
from tunix_reverb.networks import policy_network
from tunix_reverb.replay import adder as adder_lib


@dataclasses.dataclass(frozen=True)
class VTraceAgent(agent_lib.Agent):
  """See base class.

  Attributes:
    environment: specs of one environment.
    network: the policy network.
    columns: `specs.ColumnSpec` of every column of an item.
  """

  environment: specs.EnvironmentSpec
  network: policy_network.PolicyNetwork
  columns: types.Trajectories

  def make_policy(
    self, config: config_lib.ExperimentConfig, **kwargs: Any
  ) -> policy_lib.BatchedPolicy:
    del config
    return policy_lib.BatchedPolicy(self.network, **kwargs)

  def make_adder(self, **kwargs: Any) -> adder_lib.TrajectoryAdder:
    return adder_lib.TrajectoryAdder(columns=self.columns, **kwargs)

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
  return VTraceAgent(environment_spec, network, columns)
