"""How full the packer's batches are, and what packing costs.

  python -m benchmarks.packing [--num_batches=60]

Packs trajectories of log-normal length (median 20 transitions, sigma 1, cut at
trajectory_length) with several windows, into one and into several buckets, and
updates on the same batches with the learner's compiled update. Prints the mean
fill, and the CPU time per transition of packing and of updating. Then packs
token trajectories of 16 to 4096 tokens (log-normal, median 256, sigma 1.2) for
eight devices, and prints the fill, how many batches the longest wait takes, and
how evenly attention costs the devices. Takes the flags of the config; no replay
server is involved.
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
# Of tokens: row lengths, positions of a batch, shards of its rows.
_TOKEN_BUCKETS = ((4096,), (512, 1024, 4096))
_TOKEN_POSITIONS, _TOKEN_SHARDS = 131_072, 8
_TOKEN_TARGET = 0.97


def _make_item(columns, lengths):
  """An item of trajectories of zeros with `lengths` transitions, i32 [N]."""
  import numpy as np
  import tree

  n, total = lengths.size, int(lengths.sum())

  def zeros(count):
    return lambda spec: np.zeros((count, *spec.shape[1:]), spec.dtype)

  # By what a column has one entry of: see `types.Trajectories`.
  per_transition = {
    name: tree.map_structure(zeros(total), getattr(columns, name))
    for name in (
      'action', 'reward', 'discount', 'behaviour_log_prob', 'policy_version',
      'turn_id',
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


def _pack(packer, items, num_batches: int, batches: list) -> float:
  """Packs `num_batches` into `batches`; returns the CPU seconds it took."""
  cpu_s = 0.0
  for item in items:
    start_s = time.process_time()
    packer.add(item)
    batch = packer.pop()
    cpu_s += time.process_time() - start_s
    if batch is not None:
      batches.append(batch)
    if len(batches) == num_batches:
      return cpu_s
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

  def draw():
    drawn = rng.lognormal(np.log(_MEDIAN), _SIGMA, _ITEM_TRAJECTORIES)
    return np.clip(np.rint(drawn), 1, max_length).astype(np.int32)

  items = (_make_item(columns, draw()) for _ in iter(int, 1))
  batches: list = []
  pack_s = _pack(packer, items, num_batches, batches)
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
  from tunix_reverb.agents import builder

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


def _token_columns():
  """Columns of token trajectories."""
  from dm_env import specs as dm_specs
  import numpy as np

  from tunix_reverb import specs

  token = dm_specs.BoundedArray((), np.uint16, 0, 31_999)
  reward, discount = (
    dm_specs.Array((), np.float32),
    dm_specs.BoundedArray((), np.float32, 0, 1),
  )
  return specs.trajectories_spec(
    specs.EnvironmentSpec(token, token, reward, discount), has_turns=True
  )


def _measure_tokens(lengths: tuple[int, ...], num_batches: int):
  """The figures of token trajectories with buckets of `lengths`.

  `policy_version` says how many batches there were when a trajectory came.
  """
  import numpy as np

  from tunix_reverb.batching import buckets as buckets_lib
  from tunix_reverb.batching import packer as packer_lib
  from tunix_reverb.batching import placement

  rng, columns = np.random.default_rng(0), _token_columns()
  packer = packer_lib.Packer(
    buckets=buckets_lib.make_buckets(
      lengths, batch_positions=_TOKEN_POSITIONS, row_multiple=_TOKEN_SHARDS
    ),
    columns=columns,
    window=_DEFAULT_WINDOW,
    num_shards=_TOKEN_SHARDS,
  )
  batches: list = []

  def items():
    while True:
      drawn = np.rint(rng.lognormal(np.log(256), 1.2, 4))
      item = _make_item(columns, np.clip(drawn, 16, 4096).astype(np.int32) - 1)
      yield item._replace(policy_version=item.policy_version + len(batches))

  cpu_s = _pack(packer, items(), num_batches, batches)
  waits, worst = [], []
  for i, packed in enumerate(batches):
    segments = packed.segments
    waits.append(i - int(segments.policy_version.min()))
    cost = placement.attention_cost(
      segments.length + 1, segments.row, packed.batch.segment_ids.shape[0]
    )
    shards = cost.reshape(_TOKEN_SHARDS, -1).sum(axis=1)
    worst.append(shards.max() / shards.mean())
  return {
    'fill': round(float(np.mean([packer_lib.fill(b) for b in batches])), 4),
    'longest_wait_batches': max(waits),
    'worst_to_mean_attention_cost': round(float(np.mean(worst)), 3),
    'pack_ms_per_batch': round(1e3 * cpu_s / num_batches, 2),
    'batches': dict(collections.Counter(b.bucket for b in batches)),
  }


def _check(fill: float, target: float) -> dict[str, object]:
  return {'value': fill, 'target': target, 'ok': fill >= target}


def measure(context: app.RoleContext) -> int:
  """Prints the figures of every setting and one line of JSON at the end."""
  from tunix_reverb.agents import builder

  longest = context.config.batch.bucket_lengths[-1]
  agent = builder.make_agent(context.config)
  results = {}
  for fractions in _BUCKETS:
    lengths = tuple(int(fraction * longest) for fraction in fractions)
    results |= _measure_buckets(context, agent, lengths)
  fill = results[_name((longest,), _DEFAULT_WINDOW)]['fill']
  checks = {'fill_lognormal': _check(fill, _TARGET)}
  for lengths in _TOKEN_BUCKETS:
    context.watchdog.progress()
    result = _measure_tokens(lengths, flags.FLAGS.num_batches)
    name = f'tokens {_name(lengths, _DEFAULT_WINDOW)}'
    results[name] = result
    print(f'{name}: {result}', flush=True)
    key = f'fill_heavy_tail_{len(lengths)}_buckets'
    checks[key] = _check(result['fill'], _TOKEN_TARGET)
  print(
    json.dumps(
      {
        'benchmark': 'packing',
        'checks': checks,
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
