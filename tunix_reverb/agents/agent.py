"""What one kind of agent has of its own; the rest is in `builder`."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import jax

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import evaluation
from tunix_reverb.actor import loop as loop_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents import learner_config
from tunix_reverb.learner import objectives

# Seeds of different purposes are kept apart by these strides.
_ACTOR_SEED_STRIDE = 10_007
_EVALUATOR_SEED = 5_000_011


class Acting(NamedTuple):
  """One actor process.

  Attributes:
    loop: plays. Its policy has no variables yet: call its `wait_for_variables`
      first.
    adder: makes items; `items_total` counts them.
    environment: the environments.
  """

  loop: loop_lib.ActorLoop
  adder: Any
  environment: core.VectorEnvironment


class Agent(abc.ABC):
  """What every role derives from the config, by kind of agent.

  Attributes:
    columns: `specs.ColumnSpec` of every column of an item.
  """

  columns: types.Trajectories

  @abc.abstractmethod
  def make_acting(
    self,
    config: config_lib.ExperimentConfig,
    *,
    actor_id: int,
    writer: core.ItemWriter,
    variables: core.VariableSource,
    permits: core.PermitSource | None = None,
    keep_waiting: Callable[[], bool] = lambda: True,
  ) -> Acting:
    """What an actor process runs.

    Args:
      config: of the run.
      actor_id: number of the actor process.
      writer: takes the items.
      variables: where variables come from.
      permits: where permits come from, with admission.
      keep_waiting: asked when there is no room for an item; False gives it up.
    """

  @abc.abstractmethod
  def make_evaluator(
    self, config: config_lib.ExperimentConfig
  ) -> evaluation.Evaluator:
    """What an evaluator runs."""

  @abc.abstractmethod
  def make_objective(
    self, config: config_lib.ExperimentConfig, mesh: jax.sharding.Mesh
  ) -> objectives.Objective:
    """What the update optimises.

    Raises:
      ValueError: a size does not divide evenly over the mesh.
    """

  def initial_params(
    self, mesh: jax.sharding.Mesh, *, key: jax.Array
  ) -> types.Nest | None:
    """Params that training begins with, on the mesh; None for fresh ones.

    Args:
      mesh: where they go.
      key: of what a pretrained model lacks.
    """
    del mesh, key
    return None


def actor_seed(config: config_lib.ExperimentConfig, actor_id: int) -> int:
  """Of everything random in an actor process."""
  return config.seed + _ACTOR_SEED_STRIDE * (actor_id + 1)


def evaluator_seed(config: config_lib.ExperimentConfig) -> int:
  """Of the environments of evaluators, which no actor has."""
  return config.seed + _EVALUATOR_SEED


def item_transitions(
  config: config_lib.ExperimentConfig, columns: types.Trajectories
) -> int:
  """`item_bytes` in transitions; at most half a batch, to keep data fresh."""
  if config.replay.admission:
    return 1  # An item per trajectory, or per group.
  wanted = config.actor.item_bytes // specs.bytes_per_transition(columns)
  return int(max(1, min(wanted, config.batch.batch_positions // 2)))


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
    behaviour_kl_cost=learner.behaviour_kl_cost,
    reward_clip=learner.reward_clip,
    reward_scale=learner.reward_scale,
  )
