"""The learner of transformers: sharding, feeding, packing, checkpoints, MFU.

  python -m benchmarks.learner [--rounds=6] [--mfu_model=llama3.2-1b]

On whatever JAX runs on, a transformer of about 10 million params on one device
and trajectories of 16 to 1024 tokens (log-normal, median 128, sigma 1.2):

- the learner fed from a live Reverb server, whose actors keep its queue full,
  against the same updates of the same batches in memory, in turns. The feed's
  CPU time is measured by itself and compared with the update's wall time.
- packed rows against a row for each trajectory, padded: tokens of trajectories
  per second.
- how long a checkpoint keeps the learner from its next update.

On 8 virtual CPU devices: `benchmarks.learner_sharding`. On GPU or TPU only, and
on all devices of the process: model FLOPs utilisation of a larger transformer
in bfloat16, with the fused attention kernels and without. Figures are medians.
What cannot be measured here is named under 'skipped', with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags
from absl import logging

from benchmarks import learner_data

_ROUNDS = flags.DEFINE_integer('rounds', 6, 'Runs of updates from each source.')
_STEPS = flags.DEFINE_integer('steps', 5, 'Updates of a run.')
_MFU_MODEL = flags.DEFINE_string(
  'mfu_model', 'llama3.2-1b', 'Preset whose utilisation is measured.'
)
_MFU_ROWS = flags.DEFINE_integer('mfu_rows', 8, 'Its rows per device.')
_MFU_LENGTH = flags.DEFINE_integer('mfu_length', 4096, 'Tokens of its rows.')

_ROWS = 2
_FED_BATCHES = 40  # To measure the feed's CPU time on.
_MFU_STEPS = 10
_SHARDING_TIMEOUT_S = 400
# (value, target) is met at or below the target unless it is one of these.
_AT_LEAST = ('fed_over_in_memory', 'packed_over_padded', 'mfu')
_TARGETS = {
  'shard_map_over_jit': 1.0,
  'fed_over_in_memory': 0.98,
  'feed_cpu_over_update': 0.05,
  'packed_over_padded': 1.0,
  'checkpoint_blocked_s': 0.2,
  'mfu': 0.5,
}
# By how `device_kind` begins.
_CHIPS = {
  'TPU v5 lite': 'v5e',
  'TPU v5e': 'v5e',
  'TPU v5': 'v5p',
  'TPU v6': 'v6e',
  'NVIDIA H100': 'h100',
  'NVIDIA H200': 'h200',
}


def _optimiser():
  from tunix_reverb.learner import optimiser

  return optimiser.make_optimiser(
    learning_rate=1e-5,
    learning_rate_end=1.0,
    decay_steps=1,
    max_grad_norm=1.0,
  )


def _make_state(objective, mesh):
  import jax

  from tunix_reverb.learner import update

  return update.init_state(
    objective, _optimiser(), mesh, key=jax.random.PRNGKey(0)
  )


class _Small:
  """The transformer of 10 million params on one device, and its learners."""

  def __init__(self):
    import jax

    from tunix_reverb.batching import buckets
    from tunix_reverb.batching import packer
    from tunix_reverb.learner import objectives
    from tunix_reverb.learner import update
    from tunix_reverb.networks.transformer import config as config_lib
    from tunix_reverb.networks.transformer import model as model_lib
    from tunix_reverb.networks.transformer import presets
    from tunix_reverb.sharding import mesh as mesh_lib

    self.mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
    is_cpu = jax.default_backend() == 'cpu'
    compute = config_lib.ComputeConfig(
      dtype='float32' if is_cpu else 'bfloat16', attention_block=256
    )
    model = model_lib.make_transformer(presets.get('10m'), self.mesh, compute)
    self.objective = objectives.token_objective(model, objectives.LossConfig())
    self.bucket = buckets.Bucket(learner_data.ROW_LENGTH, _ROWS)
    self.columns = learner_data.columns()
    empty = packer.empty_batch(self.bucket, self.columns)
    self.update = (
      update.make_update(self.objective, _optimiser(), self.mesh)
      .lower(
        update.abstract_state(self.objective, _optimiser(), self.mesh),
        self.place(empty),
      )
      .compile()
    )

  def place(self, batch):
    from tunix_reverb.sharding import mesh as mesh_lib

    return mesh_lib.place_batch(batch, self.mesh, self.objective.batch_spec)

  def packer(self, rows=_ROWS):
    from tunix_reverb.batching import buckets
    from tunix_reverb.batching import packer

    return packer.Packer(
      buckets=(buckets.Bucket(learner_data.ROW_LENGTH, rows),),
      columns=self.columns,
      window=1.25,
    )

  def packed(self, seed: int):
    """The first full batch of the mix."""
    packer = self.packer()
    for item in learner_data.items(seed):
      packer.add(item)
      packed = packer.pop()
      if packed is not None:
        return packed
    raise AssertionError('items without end have ended')

  def padded(self, seed: int):
    """A batch with a row for each trajectory of the mix, and its tokens."""
    import jax
    import numpy as np

    rows, tokens = [], 0
    for item in learner_data.items(seed):
      for n in range(item.lengths.size):
        packer = self.packer(rows=1)
        packer.add(item, np.arange(item.lengths.size) == n)
        rows.append(packer.pop(flush=True).batch)
        tokens += int(item.lengths[n]) + 1
        if len(rows) == _ROWS:
          stack = lambda *leaves: np.concatenate(leaves)
          return jax.tree_util.tree_map(stack, *rows), tokens
    raise AssertionError('items without end have ended')

  def learner(self, batches):
    from tunix_reverb.learner import learner as learner_lib
    from tunix_reverb.staleness import bound
    from tunix_reverb.telemetry import drops
    from tunix_reverb.telemetry import metrics

    return learner_lib.PackedLearner(
      state=_make_state(self.objective, self.mesh),
      updates={self.bucket.length: self.update},
      batches=batches,
      bound=bound.StalenessBound(max_policy_lag=1000, max_age_s=1e6),
      drops=drops.DropCounter(metrics.DROP_CAUSES),
    )

  @contextlib.contextmanager
  def feed(self, address: str):
    """The feed from the server at `address`."""
    from tunix_reverb.learner import feed as feed_lib
    from tunix_reverb.replay import clients
    from tunix_reverb.staleness import bound
    from tunix_reverb.telemetry import drops
    from tunix_reverb.telemetry import metrics

    feed = feed_lib.Feed(
      clients.make_sampler([address], columns=self.columns),
      self.packer(),
      bound=bound.StalenessBound(max_policy_lag=1000, max_age_s=1e6),
      drops=drops.DropCounter(metrics.DROP_CAUSES),
      place=self.place,
      learner_version=lambda: 0,
      prefetch_batches=2,
      timeout_s=60.0,
    ).start()
    try:
      yield feed
    finally:
      feed.close()


@contextlib.contextmanager
def _server() -> Iterator[str]:
  """The server and its actors in a process of their own; its address."""
  process = subprocess.Popen(
    [sys.executable, '-W', 'ignore', '-m', 'benchmarks.learner_data'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  with process:
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
      raise RuntimeError('the replay server did not start')
    yield address
    process.communicate(timeout=30)


def _measure_feed(small: _Small) -> dict[str, float]:
  """Rates from the server over rates from memory, and the feed's CPU time."""
  seconds: dict[str, list[float]] = {'fed': [], 'in_memory': []}
  fed_batches: list = []

  def remember(batches):
    for packed in batches:
      fed_batches.append(packed)
      yield packed

  with _server() as address, small.feed(address) as feed:
    # The same batches, as what is in them may decide how long an update takes.
    learners = {
      'fed': small.learner(remember(feed)),
      'in_memory': small.learner(iter(lambda: fed_batches.pop(0), None)),
    }
    for round_ in range(_ROUNDS.value + 1):
      for name, learner in learners.items():
        start_s = time.perf_counter()
        for _ in range(_STEPS.value):
          assert learner.step() is not None, 'no batch came in time'
        if round_:  # The first warms up.
          seconds[name].append((time.perf_counter() - start_s) / _STEPS.value)
    start_s = time.process_time()
    for _ in range(_FED_BATCHES):
      assert next(feed) is not None, 'no batch came in time'
    feed_cpu_s = (time.process_time() - start_s) / _FED_BATCHES
  update_s, fed_s = map(
    statistics.median, (seconds['in_memory'], seconds['fed'])
  )
  return {
    'fed_over_in_memory': statistics.median(
      memory / fed for memory, fed in zip(seconds['in_memory'], seconds['fed'])
    ),
    'feed_cpu_over_update': feed_cpu_s / update_s,
    'feed_cpu_ms': 1e3 * feed_cpu_s,
    'update_ms': 1e3 * update_s,
    'fed_update_ms': 1e3 * fed_s,
  }


def _measure_packing(small: _Small) -> dict[str, float]:
  """Tokens of trajectories per second, packed and padded."""
  import jax

  state, rates = _make_state(small.objective, small.mesh), {}
  rates = {'packed': [], 'padded': []}
  for seed in range(_ROUNDS.value + 1):
    packed = small.packed(seed)
    tokens = int((packed.batch.segment_ids > 0).sum())
    for name, batch, count in (
      ('packed', packed.batch, tokens),
      ('padded', *small.padded(seed)),
    ):
      placed = small.place(batch)
      start_s = time.perf_counter()
      state, metrics = small.update(state, placed)
      jax.block_until_ready(metrics)
      if seed:  # The first warms up.
        rates[name].append(count / (time.perf_counter() - start_s))
  # The mean, as it is the sum of batches that counts.
  packed, padded = (statistics.mean(rates[name]) for name in rates)
  return {
    'packed_over_padded': packed / padded,
    'packed_tokens_per_s': packed,
    'padded_tokens_per_s': padded,
  }


def _measure_checkpoints(small: _Small) -> dict[str, float]:
  """Seconds that `save` takes, and until the checkpoint is complete."""
  from tunix_reverb.learner import checkpoints

  state, blocked_s, complete_s = small.learner(iter(())).state, [], []
  with tempfile.TemporaryDirectory() as directory:
    checkpointer = checkpoints.LearnerCheckpointer(directory, max_to_keep=1)
    for step in range(4):
      start_s = time.perf_counter()
      checkpointer.save(step, state, {'transitions_total': step})
      blocked_s.append(time.perf_counter() - start_s)
      checkpointer.wait(120.0)
      complete_s.append(time.perf_counter() - start_s)
    checkpointer.close(120.0)
  return {
    'checkpoint_blocked_s': statistics.median(blocked_s),
    'checkpoint_complete_s': statistics.median(complete_s),
  }


def _measure_sharding() -> dict[str, object]:
  """The worst ratio of `benchmarks.learner_sharding`, in a process of its own.

  XLA must be told of virtual devices before it starts.
  """
  virtual = '--xla_force_host_platform_device_count=8'
  result = subprocess.run(
    [sys.executable, '-m', 'benchmarks.learner_sharding'],
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': virtual},
    stdout=subprocess.PIPE,
    text=True,
    timeout=_SHARDING_TIMEOUT_S,
    check=True,
  )
  meshes = json.loads(result.stdout.splitlines()[-1])
  return {
    'shard_map_over_jit': max(mesh['ratio'] for mesh in meshes.values()),
    'meshes': meshes,
  }


def _model_flops(config, rows: int, length: int) -> float:
  """Of forward and backward pass: 6 per param and token, causal attention."""
  from tunix_reverb.networks.transformer import params

  used = params.count(config)
  if not config.tied_embeddings:  # A look-up is no product.
    used -= config.vocabulary_size * config.model_size
  heads = config.num_heads * config.head_size
  attention = 6 * config.num_layers * heads * length
  return rows * length * (6.0 * used + attention)


def _measure_mfu(attention: str, peak_flops_per_s: float) -> dict[str, float]:
  """Utilisation of all devices with one kind of attention, params sharded."""
  import jax
  import numpy as np

  from tunix_reverb import types
  from tunix_reverb.learner import objectives
  from tunix_reverb.learner import update
  from tunix_reverb.networks.transformer import config as config_lib
  from tunix_reverb.networks.transformer import model as model_lib
  from tunix_reverb.networks.transformer import presets
  from tunix_reverb.sharding import mesh as mesh_lib

  devices, config = jax.devices(), presets.get(_MFU_MODEL.value)
  mesh = mesh_lib.make_mesh(devices, data=1, fsdp=len(devices))
  model = model_lib.make_transformer(
    config, mesh, config_lib.ComputeConfig(attention=attention)
  )
  objective = objectives.token_objective(model, objectives.LossConfig())
  shape = (_MFU_ROWS.value * len(devices), _MFU_LENGTH.value)
  tokens = np.random.default_rng(0).integers(0, config.vocabulary_size, shape)
  tokens = tokens.astype(np.int32)
  ones = np.ones(shape, np.float32)
  batch = types.Batch(
    observation=tokens,
    action=np.roll(tokens, -1, axis=1),
    reward=ones,
    discount=ones,
    behaviour_log_prob=-10 * ones,
    policy_version=np.zeros(shape, np.int32),
    loss_mask=ones > 0,
    segment_ids=ones.astype(np.int32),
    segment_positions=np.tile(
      np.arange(shape[1], dtype=np.int32), (shape[0], 1)
    ),
    core_state=(),
    is_rejected=ones < 0,
  )
  batch = mesh_lib.place_batch(batch, mesh, objective.batch_spec)
  step = update.make_update(objective, _optimiser(), mesh)
  state, times_s = _make_state(objective, mesh), []
  for _ in range(_MFU_STEPS + 2):
    start_s = time.perf_counter()
    state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    times_s.append(time.perf_counter() - start_s)
  step_s = statistics.median(times_s[2:])
  flops_per_s = _model_flops(config, *shape) / step_s / len(devices)
  return {
    'mfu': flops_per_s / peak_flops_per_s,
    'step_ms': 1e3 * step_s,
    'tokens_per_s_per_device': shape[0] * shape[1] / step_s / len(devices),
  }


def _chip_of_this_machine():
  """The `chips.Chip` of the devices; None if its peak is not known."""
  import jax

  from tunix_reverb.sharding import chips

  kind = jax.devices()[0].device_kind
  names = [name for prefix, name in _CHIPS.items() if kind.startswith(prefix)]
  return chips.get(names[0]) if names else None


def _measure_accelerator(skipped: dict[str, str]) -> dict[str, object]:
  import jax

  kind = jax.devices()[0].device_kind
  if jax.default_backend() == 'cpu':
    skipped['mfu'] = 'needs a GPU or TPU'
    return {}
  chip = _chip_of_this_machine()
  if chip is None:
    skipped['mfu'] = f'the peak of {kind!r} is in no table'
    return {}
  fused = _measure_mfu('auto', chip.flops_per_s)
  plain = _measure_mfu('blocked', chip.flops_per_s)
  return {'mfu': fused['mfu'], 'chip': kind, 'fused': fused, 'plain': plain}


def _checks(figures: dict[str, object]) -> dict[str, dict[str, object]]:
  checks = {}
  for name, target in _TARGETS.items():
    value = figures.get(name)
    if value is not None:
      ok = value >= target if name in _AT_LEAST else value <= target
      value = round(value, 4)
      checks[name] = {'value': value, 'target': target, 'ok': ok}
  return checks


def main(argv: list[str]) -> None:
  """Prints the figures of every part and one line of JSON at the end."""
  del argv
  import jax

  logging.set_verbosity(logging.WARNING)  # Orbax tells of each file.
  figures: dict[str, object] = {}
  skipped: dict[str, str] = {}

  def take(part: dict[str, object]) -> None:
    for name, value in part.items():
      print(f'{name}: {value}', flush=True)
    figures.update(part)

  small = _Small()
  if importlib.util.find_spec('reverb') is None:
    for name in ('fed_over_in_memory', 'feed_cpu_over_update'):
      skipped[name] = 'needs dm-reverb for the server'
  else:
    take(_measure_feed(small))
  take(_measure_packing(small))
  take(_measure_checkpoints(small))
  take(_measure_sharding())
  take(_measure_accelerator(skipped))
  print(
    json.dumps(
      {
        'benchmark': 'learner',
        'checks': _checks(figures),
        'skipped': skipped,
        'settings': {
          'jax': jax.__version__,
          'backend': jax.default_backend(),
          'figures': figures,
        },
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
