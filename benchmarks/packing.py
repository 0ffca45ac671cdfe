"""How full the packer's batches are, and what packing costs.

  python -m benchmarks.packing [--num_batches=60]

Packs trajectories of log-normal length (median 20 transitions, sigma 1, cut at
trajectory_length) with several windows, into one and into several buckets, and
updates on the same batches with the learner's compiled update. Prints the mean
fill, and the CPU time per transition of packing and of updating. Takes the
flags of the config; no replay server is involved.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time

from absl import flags

from launch import app

flags.DEFINE_integer('num_batches', 60, 'Batches to pack for each setting.')
_WINDOWS = (1.0, 1.1, 1.25, 2.0)
_DEFAULT_WINDOW = 1.25  # Of the config.
_BUCKETS = ((1.0,), (0.25, 0.5, 1.0))  # Fractions of the longest row.
_MEDIAN, _SIGMA = 20.0, 1.0
_ITEM_TRAJECTORIES = 32
_NUM_UPDATES = 20
_TARGET = 0.95


def _make_item(columns, rng, max_length: int):
  """An item of `_ITEM_TRAJECTORIES` trajectories of zeros."""
  import numpy as np
  import tree

  n = _ITEM_TRAJECTORIES
  drawn = np.rint(rng.lognormal(np.log(_MEDIAN), _SIGMA, n))
  lengths = np.clip(drawn, 1, max_length).astype(np.int32)
  total = int(lengths.sum())

  def zeros(count):
    return lambda spec: np.zeros((count, *spec.shape[1:]), spec.dtype)

  # By what a column has one entry of: see `types.Trajectories`.
  per_transition = {
    name: zeros(total)(getattr(columns, name))
    for name in (
      'action', 'reward', 'discount', 'behaviour_log_prob', 'policy_version',
    )
  }  # fmt: skip
  per_trajectory = {
    name: zeros(n)(getattr(columns, name))
    for name in (
      'created_at_s', 'actor_id', 'episode_id', 'truncated', 'permit_id',
    )
  }  # fmt: skip
  return columns._replace(
    observation=tree.map_structure(zeros(total + n), columns.observation),
    core_state=tree.map_structure(zeros(n), columns.core_state),
    loss_mask=np.ones(total, np.bool_),
    lengths=lengths,
    **per_transition,
    **per_trajectory,
  )


def _pack(packer, items, num_batches: int):
  """(batches, CPU seconds) of packing, from the first full window on."""
  batches, cpu_s = [], 0.0
  for item in items:
    start_s = time.process_time()
    packer.add(item)
    batch = packer.pop()
    cpu_s += time.process_time() - start_s
    if batch is not None:
      batches.append(batch)
    if len(batches) == num_batches:
      return batches, cpu_s
  raise AssertionError('items without end have ended')


def _update_cpu_s(parts, state: list, batches) -> tuple[float, int]:
  """(CPU seconds, transitions) of updates on `batches`, which are placed."""
  import jax

  from tunix_reverb.sharding import mesh as mesh_lib

  cpu_s, transitions = 0.0, 0
  for packed in batches:
    placed = mesh_lib.place_batch(packed.batch, parts.mesh)
    jax.block_until_ready(placed)
    start_s = time.process_time()
    state[0], metrics = parts.updates[packed.bucket](state[0], placed)
    jax.block_until_ready(metrics)
    cpu_s += time.process_time() - start_s
    transitions += int(packed.segments.length.sum())
  return cpu_s, transitions


def _measure(parts, state, columns, *, window, num_batches, max_length):
  """The figures of one setting."""
  import numpy as np

  from tunix_reverb.batching import packer as packer_lib

  rng = np.random.default_rng(0)
  packer = packer_lib.Packer(
    buckets=parts.buckets, columns=columns, window=window
  )
  items = (_make_item(columns, rng, max_length) for _ in iter(int, 1))
  batches, pack_s = _pack(packer, items, num_batches)
  transitions = sum(int(b.segments.length.sum()) for b in batches)
  update_s, updated = _update_cpu_s(parts, state, batches[-_NUM_UPDATES:])
  return {
    'fill': round(float(np.mean([packer_lib.fill(b) for b in batches])), 4),
    'pack_us_per_transition': round(1e6 * pack_s / transitions, 3),
    'update_us_per_transition': round(1e6 * update_s / updated, 3),
    'batches': dict(collections.Counter(b.bucket for b in batches)),
  }


def _measure_buckets(context, agent, lengths: tuple[int, ...]):
  """The figures of every window with buckets of `lengths`, by name."""
  from tunix_reverb.agents.vtrace import builder

  config = context.config
  batch = dataclasses.replace(config.batch, bucket_lengths=lengths)
  parts = builder.make_learner_parts(
    dataclasses.replace(config, batch=batch), agent
  )
  state, results = [parts.state], {}
  for window in _WINDOWS:
    context.watchdog.progress()
    result = _measure(
      parts,
      state,
      agent.columns,
      window=window,
      num_batches=flags.FLAGS.num_batches,
      max_length=config.actor.trajectory_length,
    )
    name = _name(lengths, window)
    results[name] = result
    pack, update = (
      result[f'{part}_us_per_transition'] for part in ('pack', 'update')
    )
    print(
      f'{name:32} fill {result["fill"]:.3f}, packing {pack:.2f} us of CPU '
      f'per transition, {pack / update:.0%} of the update ({update:.2f} us); '
      f'batches by bucket: {result["batches"]}',
      flush=True,
    )
  return results


def _name(lengths: tuple[int, ...], window: float) -> str:
  return f'buckets {"+".join(map(str, lengths))} window {window:g}'


def measure(context: app.RoleContext) -> int:
  """Prints the figures of every setting and one line of JSON at the end."""
  from tunix_reverb.agents.vtrace import builder

  longest = context.config.batch.bucket_lengths[-1]
  agent = builder.make_agent_spec(context.config)
  results = {}
  for fractions in _BUCKETS:
    lengths = tuple(int(fraction * longest) for fraction in fractions)
    results |= _measure_buckets(context, agent, lengths)
  fill = results[_name((longest,), _DEFAULT_WINDOW)]['fill']
  check = {'value': fill, 'target': _TARGET, 'ok': fill >= _TARGET}
  print(
    json.dumps(
      {
        'benchmark': 'packing',
        'checks': {'fill_lognormal': check},
        'settings': results,
      }
    )
  )
  return 0


def main() -> None:
  """Entry point."""
  app.run(measure, role='packing', single_threaded_xla=True)


if __name__ == '__main__':
  main()
