"""Measures one part of the pipeline alone; run by `benchmarks.pipeline`.

  python -m benchmarks.parts --part=act --environment=gym:CartPole-v1

prints one JSON line with the transitions per CPU-second of this process. The
parts are what the pipeline cannot do without: stepping the raw environments
through their own library, the jitted policy call, and the compiled update on a
full batch that is already there.
"""

from __future__ import annotations

import json
import time

from absl import flags

from launch import app

flags.DEFINE_enum('part', None, ['env', 'act', 'learn'], 'What to measure.')
flags.DEFINE_float('seconds', 2.0, 'CPU time to measure for, seconds.')


def _transitions_per_cpu_s(call, seconds: float) -> float:
  """Transitions per CPU-second of `call`, which returns how many it made."""
  for _ in range(20):
    call()
  transitions, start_s = 0.0, time.process_time()
  while (elapsed_s := time.process_time() - start_s) < seconds:
    for _ in range(10):
      transitions += call()
  return transitions / elapsed_s


def _raw_env_call(name: str, num: int):
  """A call that steps `num` raw environments once, resets included.

  It returns how many transitions that made: a step that only resets is none.
  """
  import numpy as np

  rng = np.random.default_rng(0)
  scheme, _, id_ = name.partition(':')
  if scheme == 'envpool':
    import envpool

    pool = envpool.make(id_, env_type='gym', num_envs=num, num_threads=1)
    pool.reset()
    actions = rng.integers(0, pool.action_space.n, (64, num)).astype(np.int32)
    turn = iter(range(10**12))

    def step_envpool():
      info = pool.step(actions[next(turn) % 64])[-1]
      return np.count_nonzero(info['elapsed_step'])

    return step_envpool
  if scheme == 'gym':
    import gymnasium

    env = gymnasium.make(id_)
    env.reset(seed=0)
    actions = rng.integers(0, env.action_space.n, num).tolist()

    def step_gym():
      for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
          env.reset()
      return num

    return step_gym
  if scheme == 'bsuite':
    import bsuite

    env = bsuite.load_from_id(id_)
  else:
    from tunix_reverb.environments import factory

    env = factory.make(name, seed=0)
  env.reset()
  actions = rng.integers(0, env.action_spec().num_values, num).tolist()

  def step_dm_env():
    for action in actions:
      env.step(action)
    return num * share

  # A step after LAST resets and is no transition.
  steps = [env.step(actions[i % num]).first() for i in range(1000)]
  share = 1.0 - np.mean(steps)
  return step_dm_env


def _act_call(config, agent, params):
  """A policy call of one actor process."""
  import jax
  import numpy as np

  from tunix_reverb import types
  from tunix_reverb.actor import policy as policy_lib

  num = config.actor.environments_per_actor
  policy = policy_lib.BatchedPolicy(agent.network, num_environments=num, seed=0)
  policy.set_variables(types.Variables(1, params))
  observation = jax.tree_util.tree_map(
    lambda s: np.zeros((num, *s.shape), s.dtype), agent.environment.observation
  )
  ids, first = np.arange(num, dtype=np.int32), np.zeros(num, np.bool_)

  def act():
    policy.act(ids, observation, first)
    return num

  return act


def _learn_call(config, agent, parts):
  """An update on one full batch."""
  import jax
  import numpy as np

  from tunix_reverb.batching import packer as packer_lib

  bucket = parts.buckets[-1]
  batch = packer_lib.empty_batch(bucket, agent.columns)
  # The longest trajectories there are: the most transitions a row can hold.
  catch = 'catch' in config.environment
  size = 10 if catch else config.actor.trajectory_length + 1
  used = bucket.length // size * size
  positions = np.arange(used) % size
  batch.segment_positions[:, :used] = positions
  batch.segment_ids[:, :used] = np.arange(used) // size + 1
  batch.loss_mask[:, :used] = positions != size - 1
  transitions = int(batch.loss_mask.sum())
  state = [parts.state]

  def update():
    state[0], metrics = parts.updates[bucket.length](state[0], batch)
    jax.block_until_ready(metrics)
    return transitions

  return update


def measure(context: app.RoleContext) -> int:
  """Prints the transitions per CPU-second of one part."""
  from tunix_reverb.agents import builder

  config, part = context.config, flags.FLAGS.part
  if part == 'env':
    call = _raw_env_call(
      config.environment, config.actor.environments_per_actor
    )
  else:
    agent = builder.make_agent(config)
    parts = builder.make_learner_parts(config, agent)
    if part == 'act':
      call = _act_call(config, agent, parts.state.params)
    else:
      call = _learn_call(config, agent, parts)
  rate = _transitions_per_cpu_s(call, flags.FLAGS.seconds)
  print(json.dumps({'part': part, 'transitions_per_cpu_s': rate}))
  context.watchdog.close()
  return 0


def main() -> None:
  """Entry point."""
  app.run(measure, role='parts', single_threaded_xla=True)


if __name__ == '__main__':
  main()
