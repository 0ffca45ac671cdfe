"""Actors and evaluators of a policy network."""

from __future__ import annotations

from collections.abc import Callable

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import admission
from tunix_reverb.actor import evaluation
from tunix_reverb.actor import loop as loop_lib
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.environments import factory
from tunix_reverb.networks import policy_network
from tunix_reverb.replay import adder as adder_lib


def make_acting(
  config: config_lib.ExperimentConfig,
  network: policy_network.PolicyNetwork,
  columns: types.Trajectories,
  *,
  actor_id: int,
  writer: core.ItemWriter,
  variables: core.VariableSource,
  permits: core.PermitSource | None = None,
  keep_waiting: Callable[[], bool] = lambda: True,
) -> agent_lib.Acting:
  """See `agent.Agent.make_acting`."""
  num = config.actor.environments_per_actor
  seed = agent_lib.actor_seed(config, actor_id)
  environment = factory.make_vector(
    config.environment,
    num_environments=num,
    mode=config.actor.environment_mode,
    seed=seed,
    timeout_s=config.actor.environment_timeout_s,
  )
  adder = adder_lib.TrajectoryAdder(
    columns=columns,
    num_environments=num,
    trajectory_length=config.actor.trajectory_length,
    writer=writer,
    actor_id=actor_id,
    item_transitions=agent_lib.item_transitions(config, columns),
    item_age_s=config.actor.item_age_s,
    keep_waiting=keep_waiting,
  )
  parts = {
    'environment': environment,
    'policy': policy_lib.BatchedPolicy(
      network,
      num_environments=num,
      seed=seed,
      independent=permits is not None,
    ),
    'adder': adder,
    'variables': variables,
    'variable_update_period_s': config.actor.variable_update_period_s,
  }
  if permits is None:
    return agent_lib.Acting(loop_lib.ActorLoop(**parts), adder, environment)
  loop = admission.AdmittedLoop(
    **parts,
    permits=permits,
    # So that a synchronous run comes out the same every time.
    in_turn=config.staleness.max_policy_lag == 0,
  )
  return agent_lib.Acting(loop, adder, environment)


def make_evaluator(
  config: config_lib.ExperimentConfig, network: policy_network.PolicyNetwork
) -> evaluation.Evaluator:
  """See `agent.Agent.make_evaluator`."""
  num_episodes = config.evaluation.evaluation_episodes
  num = evaluation.environments_for(num_episodes)
  environment = factory.make_vector(
    config.environment,
    num_environments=num,
    mode='vectorised',
    seed=agent_lib.evaluator_seed(config),
    timeout_s=config.actor.environment_timeout_s,
  )
  policy = policy_lib.BatchedPolicy(
    network, num_environments=num, seed=config.seed, greedy=True
  )
  return evaluation.PolicyEvaluator(
    environment, policy, num_episodes=num_episodes
  )
