"""The `shard_map` update against plain `jit`; run by `benchmarks.learner`.

  XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
    python -m benchmarks.learner_sharding

The same transformer, loss, optimiser and shardings twice: our update, and a
twin written for whole arrays, in which XLA's partitioner (GSPMD) places the
collectives. The twin is told where activations go: to where ours are. Prints
one line of JSON.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import json
import math
import statistics
import time

from absl import app
from absl import flags

_REPETITIONS = flags.DEFINE_integer('repetitions', 15, 'Steps of each kind.')
_ROWS, _LENGTH = 16, 128
# (data, fsdp, sequence, tensor).
_MESHES = ((2, 2, 1, 2), (1, 2, 2, 2), (1, 8, 1, 1))
_TOLERANCE = 1e-4  # Of loss and gradient norm, between the two.


def _config():
  """About 3 million params."""
  import dataclasses

  from tunix_reverb.networks.transformer import presets

  return dataclasses.replace(
    presets.get('10m'), num_layers=4, vocabulary_size=1024, num_kv_heads=8
  )


def _batch():
  """Rows of two segments each; a NumPy `types.Batch`."""
  import numpy as np

  from tunix_reverb import types

  rng, shape = np.random.default_rng(0), (_ROWS, _LENGTH)
  tokens = lambda: rng.integers(0, 1024, shape).astype(np.uint16)
  ids = np.ones(shape, np.int32)
  ids[:, _LENGTH // 3 :] = 2
  places = np.arange(_LENGTH, dtype=np.int32)
  places = np.where(ids[0] == 1, places, places - _LENGTH // 3)
  return types.Batch(
    observation=tokens(),
    action=tokens(),
    reward=rng.normal(size=shape).astype(np.float32),
    discount=np.ones(shape, np.float32),
    behaviour_log_prob=np.full(shape, -math.log(1024), np.float32),
    policy_version=np.zeros(shape, np.int32),
    loss_mask=rng.random(shape) < 0.9,
    segment_ids=ids,
    segment_positions=np.tile(places, (_ROWS, 1)),
    core_state=(),
    turn_id=np.zeros(shape, np.int32),
    is_rejected=np.zeros(shape, np.bool_),
  )


def _attend(queries, keys, values, ids, constrain):
  """Attention of as many query as key heads, all [B, L, H, d]."""
  import jax
  import jax.numpy as jnp

  from tunix_reverb.sharding import mesh as mesh_lib

  axes = (mesh_lib.BATCH_AXES, mesh_lib.TENSOR, mesh_lib.SEQUENCE, None)
  scores = jnp.einsum('bqhd,bshd->bhqs', queries, keys)
  scores = constrain(scores / math.sqrt(queries.shape[-1]), *axes)
  same = (ids[:, :, None] == ids[:, None, :]) & (ids[:, :, None] > 0)
  mask = (same & jnp.tri(ids.shape[1], dtype=bool)[None])[:, None]
  weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
  weights = jnp.where(mask, weights, 0.0)
  outputs = jnp.einsum('bhqs,bshd->bqhd', weights, values)
  return constrain(outputs, axes[0], axes[2], axes[1], None)


def _outputs(model, specs, params, batch):
  """(log_probs, entropies, values) of whole arrays [B, L], partitioned by XLA.

  The maths of `networks.transformer`, with attention by its reference.
  """
  import jax
  import jax.numpy as jnp

  from tunix_reverb.networks.transformer import layers
  from tunix_reverb.networks.transformer import rope
  from tunix_reverb.sharding import mesh as mesh_lib

  config, rows = model.config, mesh_lib.BATCH_AXES
  sequence, tensor = mesh_lib.SEQUENCE, mesh_lib.TENSOR
  own = mesh_lib.POSITION_AXES
  constrain = lambda x, *spec: jax.lax.with_sharding_constraint(
    x, jax.sharding.NamedSharding(model.mesh, mesh_lib.PartitionSpec(*spec))
  )

  def gathered(param, spec):
    return constrain(param, *(tensor if s == tensor else None for s in spec))

  rotation = rope.rotation(config, batch.segment_positions)
  ids, epsilon = batch.segment_ids, config.norm_epsilon

  def heads(x, kernel, positions, *, turn=True):
    y = (x @ kernel).reshape(*x.shape[:2], -1, config.head_size)
    y = rope.rotate(y, rotation).astype(x.dtype) if turn else y
    return constrain(y, rows, positions, tensor, None)

  def body(x, layer):
    p = {k: gathered(v, specs['layers'][k][1:]) for k, v in layer.items()}
    y = layers.rms_norm(x, p['attention_norm'], epsilon)
    y = constrain(y, rows, sequence, None)
    y = _attend(
      heads(y, p['query'], sequence),
      heads(y, p['key'], None),
      heads(y, p['value'], None, turn=False),
      ids,
      constrain,
    )
    y = y.reshape(*y.shape[:2], -1) @ p['output']
    x = x + constrain(y, rows, own, None)
    y = layers.rms_norm(x, p['mlp_norm'], epsilon)
    y = constrain(y, rows, sequence, None)
    y = jax.nn.silu(y @ p['gate']) * (y @ p['up'])
    y = constrain(y, rows, sequence, tensor) @ p['down']
    return x + constrain(y, rows, own, None), ()

  @functools.partial(
    jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable
  )
  def head(x, kernel):
    logits = constrain(x @ kernel.T, rows, sequence, tensor)
    log_probs = jax.nn.log_softmax(logits)
    target = batch.action.astype(jnp.int32)[..., None]
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    log_prob = jnp.sum(jnp.where(vocabulary == target, log_probs, 0.0), -1)
    return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

  table = gathered(params['embedding'], specs['embedding'])
  x = constrain(table[batch.observation.astype(jnp.int32)], rows, own, None)
  body = jax.checkpoint(
    body,
    policy=jax.checkpoint_policies.nothing_saveable,
    prevent_cse=False,
  )
  x, _ = jax.lax.scan(body, x, params['layers'])
  x = layers.rms_norm(x, params['final_norm'], epsilon)
  values = params['value_head']
  value = jnp.sum(x * values['kernel'][None, None], -1) + values['bias']
  log_prob, entropy = head(
    constrain(x, rows, sequence, None), gathered(params['head'], specs['head'])
  )
  return log_prob, entropy, value


def _twin(model, objective, optimiser) -> Callable:
  """The update of whole arrays, jitted; what `update.make_update` returns."""
  import dataclasses

  import jax
  import jax.numpy as jnp

  from tunix_reverb.learner import update as update_lib
  from tunix_reverb.ops import token_loss
  from tunix_reverb.sharding import mesh as mesh_lib

  config = objective.loss_config
  # Of whole arrays: norms need no sums over devices.
  whole = dataclasses.replace(objective, param_specs=mesh_lib.replicated_spec())

  def whole_rows(tree):
    spec = jax.sharding.NamedSharding(model.mesh, mesh_lib.batch_spec())
    return jax.lax.with_sharding_constraint(tree, spec)

  def loss(params, batch):
    outputs = _outputs(model, objective.param_specs, params, batch)
    # V-trace goes along rows.
    outputs, batch = whole_rows((outputs, batch))
    sums = token_loss.TokenLoss(
      discount_factor=config.discount_factor,
      rho_bar=config.rho_bar,
      c_bar=config.c_bar,
      vtrace_lambda=config.vtrace_lambda,
    ).sums(
      *outputs,
      rewards=config.shape_rewards(batch.reward),
      discounts=batch.discount,
      behaviour_log_probs=batch.behaviour_log_prob,
      loss_mask=batch.loss_mask & ~batch.is_rejected,
      segment_ids=batch.segment_ids,
    )
    ids = batch.segment_ids
    is_transition = jnp.pad(ids[:, :-1] == ids[:, 1:], ((0, 0), (0, 1)))
    counts = (batch.loss_mask & is_transition & (ids > 0)).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(counts), 1.0)
    return config.total(sums, count), update_lib.Sums(sums, count)

  def step(state, batch):
    (value, sums), grads = jax.value_and_grad(loss, has_aux=True)(
      state.params, batch
    )
    return update_lib.apply_gradients(
      whole, optimiser, state, grads, value, sums
    )

  state = update_lib.abstract_state(objective, optimiser, model.mesh)
  shardings = jax.tree_util.tree_map(lambda x: x.sharding, state)
  named = lambda spec: jax.sharding.NamedSharding(model.mesh, spec)
  return jax.jit(
    step,
    donate_argnums=(0,),
    in_shardings=(shardings, named(objective.batch_spec)),
    out_shardings=(shardings, named(mesh_lib.replicated_spec())),
  )


def _measure(sizes: tuple[int, ...]) -> dict[str, float]:
  """Median seconds of a step of each kind on one mesh, wall and CPU."""
  import jax

  from tunix_reverb.learner import objectives
  from tunix_reverb.learner import optimiser as optimiser_lib
  from tunix_reverb.learner import update as update_lib
  from tunix_reverb.networks.transformer import config as config_lib
  from tunix_reverb.networks.transformer import model as model_lib
  from tunix_reverb.sharding import mesh as mesh_lib

  mesh = mesh_lib.make_mesh(
    jax.devices(), **dict(zip(mesh_lib.AXES, sizes, strict=True))
  )
  compute = config_lib.ComputeConfig(
    dtype='float32',
    remat='layer',
    attention='reference',
    head_block=_ROWS * _LENGTH,
  )
  model = model_lib.make_transformer(_config(), mesh, compute)
  objective = objectives.token_objective(model, objectives.LossConfig())
  optimiser = optimiser_lib.make_optimiser(
    learning_rate=1e-4,
    learning_rate_end=1.0,
    decay_steps=1,
    max_grad_norm=1.0,
  )
  batch = mesh_lib.place_batch(_batch(), mesh, objective.batch_spec)
  updates = {
    'shard_map': update_lib.make_update(objective, optimiser, mesh),
    'jit': _twin(model, objective, optimiser),
  }
  states, metrics = {}, {}
  times_s = {name: [] for name in updates}
  cpu_times_s = {f'{name}_cpu': [] for name in updates}
  for name, update in updates.items():
    states[name] = update_lib.init_state(
      objective, optimiser, mesh, key=jax.random.PRNGKey(0)
    )
    # One program at a time: two that wait for eight devices each can lock.
    states[name], metrics[name] = jax.block_until_ready(
      update(jax.block_until_ready(states[name]), batch)
    )
  _check_agreement(metrics)
  for _ in range(_REPETITIONS.value):
    for name, update in updates.items():
      start_s, cpu_start_s = time.perf_counter(), time.process_time()
      states[name], metrics[name] = update(states[name], batch)
      jax.block_until_ready(states[name])
      times_s[name].append(time.perf_counter() - start_s)
      cpu_times_s[f'{name}_cpu'].append(time.process_time() - cpu_start_s)
  all_times = times_s | cpu_times_s
  return {name: statistics.median(times) for name, times in all_times.items()}


def _check_agreement(metrics) -> None:
  """Raises unless all kinds compute the same."""
  expected = metrics['shard_map']
  for name, values in metrics.items():
    for key in ('loss', 'grad_norm', 'entropy'):
      a, b = float(values[key]), float(expected[key])
      if not abs(a - b) <= _TOLERANCE * abs(b):
        raise AssertionError(f'{key} is {b} with shard_map, {a} with {name}')


def main(argv: list[str]) -> None:
  """Prints medians of every mesh as one line of JSON."""
  del argv
  import jax

  jax.config.update('jax_threefry_partitionable', True)
  results = {}
  for sizes in _MESHES:
    seconds = _measure(sizes)
    results['x'.join(map(str, sizes))] = {
      'ratio': round(seconds['shard_map'] / seconds['jit'], 3),
      'cpu_ratio': round(seconds['shard_map_cpu'] / seconds['jit_cpu'], 3),
      'median_ms': {k: round(1e3 * x, 1) for k, x in seconds.items()},
    }
  print(json.dumps(results))


if __name__ == '__main__':
  app.run(main)
