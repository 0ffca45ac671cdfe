"""What one kind of agent has of its own; the rest is in `builder`."""

from __future__ import annotations

import abc
from typing import Any

import jax

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents import learner_config
from tunix_reverb.learner import objectives
from tunix_reverb.replay import adder as adder_lib


class Agent(abc.ABC):
  """What every role derives from the config, by kind of agent.

  Attributes:
    environment: specs of one environment.
    columns: `specs.ColumnSpec` of every column of an item.
  """

  environment: specs.EnvironmentSpec
  columns: types.Trajectories

  @abc.abstractmethod
  def make_policy(
    self,
    config: config_lib.ExperimentConfig,
    *,
    num_environments: int,
    seed: int,
    greedy: bool = False,
    independent: bool = False,
  ) -> Any:
    """A policy without variables; see `actor.policy.BatchedPolicy`."""

  @abc.abstractmethod
  def make_adder(self, **kwargs: Any) -> adder_lib.TrajectoryAdder:
    """What turns timesteps into items; see `TrajectoryAdder`."""

  @abc.abstractmethod
  def make_objective(
    self, config: config_lib.ExperimentConfig, mesh: jax.sharding.Mesh
  ) -> objectives.Objective:
    """What the update optimises.

    Raises:
      ValueError: a size does not divide evenly over the mesh.
    """


def loss_config(
  learner: learner_config.LearnerConfig,
) -> objectives.LossConfig:
  """The constants of the loss."""
  return objectives.LossConfig(
    discount_factor=learner.discount_factor,
    rho_bar=learner.rho_bar,
    c_bar=learner.c_bar,
    vtrace_lambda=learner.vtrace_lambda,
    baseline_cost=learner.baseline_cost,
    entropy_cost=learner.entropy_cost,
    reward_clip=learner.reward_clip,
    reward_scale=learner.reward_scale,
  )
