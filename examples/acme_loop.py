"""A plain dm_env loop, written the Acme way, drives our Actor and Adder.

  python -m examples.acme_loop

starts a replay server in this process, acts in one Catch environment, and
reads back what was stored. Nothing here knows about packing or the learner:
swap in your own environment, or your own `core.Adder`.
"""

from __future__ import annotations

import dm_env
import jax

from tunix_reverb import core
from tunix_reverb import types
from tunix_reverb.actor import actor as actor_lib
from tunix_reverb.actor import policy as policy_lib
from tunix_reverb.agents import builder
from tunix_reverb.agents import config as config_lib
from tunix_reverb.environments import factory
from tunix_reverb.replay import adder as adder_lib
from tunix_reverb.replay import clients


def run_episode(environment: dm_env.Environment, actor: core.Actor) -> float:
  """The loop of `acme.EnvironmentLoop`; returns the episode's return."""
  timestep = environment.reset()
  actor.observe_first(timestep)
  episode_return = 0.0
  while not timestep.last():
    action = actor.select_action(timestep.observation)
    timestep = environment.step(action)
    actor.observe(action, next_timestep=timestep)
    actor.update()
    episode_return += timestep.reward
  return episode_return


def main(num_episodes: int = 5) -> list[types.Trajectories]:
  """Plays `num_episodes`; returns the items that the replay server held."""
  config = config_lib.ExperimentConfig(environment='catch')
  agent = builder.make_agent(config)
  server = clients.make_server(
    config=builder.make_table_config(config),
    columns=agent.columns,
    port=0,
    checkpoint_dir=None,
  )
  sink = clients.make_variable_sink(server.address)
  source = clients.make_variable_source(server.address)
  writer = clients.make_writer(server.address, columns=agent.columns)
  sampler = clients.make_sampler([server.address], columns=agent.columns)
  try:
    # What a learner would publish after every update.
    params = agent.network.init(jax.random.PRNGKey(0))
    sink.publish(types.Variables(1, jax.device_get(params)), timeout_s=10.0)
    adder = adder_lib.EnvironmentAdder(
      adder_lib.TrajectoryAdder(
        columns=agent.columns,
        num_environments=1,
        trajectory_length=config.actor.trajectory_length,
        writer=writer,
        actor_id=0,
        item_transitions=1,  # Each trajectory is an item of its own.
        item_age_s=config.actor.item_age_s,
      )
    )
    actor = actor_lib.PolicyActor(
      policy_lib.BatchedPolicy(agent.network, num_environments=1, seed=0),
      source,
      adder=adder,
    )
    environment = factory.make('catch', seed=0)
    items = []
    for episode in range(num_episodes):
      episode_return = run_episode(environment, actor)
      item = sampler.sample(timeout_s=10.0)
      assert item is not None, 'the episode did not reach the table'
      items.append(item.trajectories)
      print(
        f'episode {episode}: return {episode_return:+.0f}, stored '
        f'{item.trajectories.lengths.tolist()} transitions of version '
        f'{int(item.priority)}'
      )
    return items
  finally:
    sampler.close()
    writer.close(timeout_s=2.0)
    source.close()
    sink.close()
    server.stop(timeout_s=2.0)


if __name__ == '__main__':
  main()
