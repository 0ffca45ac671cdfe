"""Our Learner consumes someone else's iterator: no actor, no replay server.

  python -m examples.own_iterator

makes its own episodes of a two-armed bandit in a generator, lays them into
rows with the packer, and learns from them. Replace `episodes` by a data set of
logged trajectories: what the learner needs is `types.PackedBatch`.
"""

from __future__ import annotations

from collections.abc import Iterator
import time

from dm_env import specs as dm_specs
import jax
import numpy as np

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.agents import builder
from tunix_reverb.agents import flat
from tunix_reverb.agents.vtrace import agent as vtrace_agent
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.networks import policy_network

_SPEC = specs.EnvironmentSpec(
  observation=dm_specs.Array((1,), np.float32),
  action=dm_specs.DiscreteArray(2),
  reward=dm_specs.Array((), np.float32),
  discount=dm_specs.BoundedArray((), np.float32, 0.0, 1.0),
)


def episodes(num: int, generator: np.random.Generator) -> types.Trajectories:
  """`num` one-step episodes of a uniform policy; arm 1 pays 1, arm 0 none."""
  arm = generator.integers(0, 2, num).astype(np.uint8)
  return types.Trajectories(
    observation=np.ones((2 * num, 1), np.float32),
    action=arm,
    reward=arm.astype(np.float32),
    discount=np.zeros(num, np.float32),
    behaviour_log_prob=np.full(num, np.log(0.5), np.float32),
    policy_version=np.zeros(num, np.int32),
    loss_mask=np.ones(num, np.bool_),
    core_state=(),
    lengths=np.ones(num, np.int32),
    created_at_s=np.full(num, time.time()),  # Logged data counts as new.
    actor_id=np.zeros(num, np.int32),
    episode_id=np.arange(num, dtype=np.int64),
    truncated=np.zeros(num, np.bool_),
    permit_id=np.zeros(num, np.int64),
  )


def batches(
  packer: packer_lib.Packer, seed: int
) -> Iterator[types.PackedBatch]:
  """An endless iterator of packed batches."""
  generator = np.random.default_rng(seed)
  while True:
    packer.add(episodes(16, generator))
    packed = packer.pop()
    if packed is not None:
      yield packed


def main(num_learner_steps: int = 200) -> float:
  """Learns; returns the probability that the policy gives to the better arm."""
  config = flat.from_flat(
    {
      'trajectory_length': 33,
      'bucket_lengths': (34,),
      'batch_positions': 340,
      'learning_rate': 1e-2,
      'entropy_cost': 0.0,
    }
  )
  network = policy_network.make_policy_network(_SPEC)
  agent = vtrace_agent.VTraceAgent(network, specs.trajectories_spec(_SPEC))
  parts = builder.make_learner_parts(config, agent)
  packer = packer_lib.Packer(
    buckets=parts.buckets, columns=agent.columns, window=1.0
  )
  learner = builder.make_learner(
    config,
    parts,
    batches=batches(packer, seed=0),
    drops=builder.make_drop_counter(),
    on_report=lambda metrics, step: print(
      f'learner step {step}: loss {metrics["loss"]:+.3f}, entropy '
      f'{metrics["entropy"]:.3f}, batch fill {metrics["batch_fill"]:.2f}'
    ),
  )
  learner.run(num_learner_steps)
  (params,) = learner.get_variables(['params'])
  logits, _, _ = network.step(
    params, np.ones((1, 1), np.float32), (), np.ones(1, np.bool_)
  )
  better = float(jax.nn.softmax(logits)[0, 1])
  print(f'the better arm is chosen with probability {better:.2f}')
  return better


if __name__ == '__main__':
  main()
