"""A transformer in the fewest lines: no mesh, no blocks, no scan, no remat.

And what the tests of the real one share: tiny models, packed batches, a loss
that every output and every param takes part in.
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.networks.transformer import rope
from tunix_reverb.sharding import gradients as gradients_lib
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import positions as positions_lib
from tunix_reverb.sharding import shards

# Odd sizes where sharding allows them, so that mixed-up dims do not go unseen.
TINY = config_lib.TransformerConfig(
  vocabulary_size=48,
  num_layers=2,
  model_size=32,
  mlp_size=40,
  num_heads=16,
  num_kv_heads=8,
  head_size=4,
  rope_theta=100.0,
)
# Every option at once; the kinds differ in options only.
ALL_OPTIONS = dataclasses.replace(
  TINY,
  qk_norm=True,
  qkv_bias=True,
  rope_scaling=config_lib.RopeScaling(factor=4.0, original_length=32),
)
# Blocks so small that each test meets several of them.
F32 = config_lib.ComputeConfig(dtype='float32', head_block=3, attention_block=8)


def random_params(config, seed=0):
  """Params of which none is 0 or 1, so that all of them matter."""
  rng = np.random.default_rng(seed)

  def values(shape):
    mean = 1.0 if len(shape.shape) <= 2 and shape.shape[-1:] else 0.0
    scale = 0.3 if len(shape.shape) > 1 else 0.1
    return (mean + scale * rng.normal(size=shape.shape)).astype(np.float32)

  params = jax.tree_util.tree_map(values, params_lib.shapes(config))
  params['embedding'] -= 1.0
  if 'head' in params:
    params['head'] -= 1.0
  return params


def formula_params(config):
  """Params that can be written down, for comparison with other programs.

  The n-th leaf in sorted order holds cos(0.37 k + n) in row-major order of k,
  times 0.2, plus 1 for norms.
  """
  shapes, treedef = jax.tree_util.tree_flatten_with_path(
    params_lib.shapes(config)
  )
  leaves = [
    0.2 * np.cos(0.37 * np.arange(np.prod(x.shape)) + n).reshape(x.shape)
    + (1.0 if str(path[-1]).endswith("norm']") else 0.0)
    for n, (path, x) in enumerate(shapes)
  ]
  return treedef.unflatten([x.astype(np.float32) for x in leaves])


def packed_batch(config, *, rows, length, seed=0):
  """A batch of packed rows, each with segments of its own and padding."""
  rng = np.random.default_rng(seed)
  ids = np.zeros((rows, length), np.int32)
  places = np.zeros((rows, length), np.int32)
  for b in range(rows):
    start, segment = 0, 1
    while start < length - 3:
      size = min(int(rng.integers(2, length)), length - start)
      ids[b, start : start + size] = segment
      places[b, start : start + size] = np.arange(size)
      start, segment = start + size, segment + 1
  tokens, next_tokens = rng.integers(
    0, config.vocabulary_size, (2, rows, length)
  ).astype(np.int32)
  return tokens, next_tokens, ids, places


def outputs(config, params, tokens, next_tokens, segment_ids, places):
  """(log_prob, entropy, value), each [B, L]; padding holds anything."""
  length = tokens.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  mask = (same & np.tri(length, dtype=bool)[None])[:, None]
  angles = places[..., None] * rope.frequencies(config)[None, None]
  cos, sin = np.cos(angles)[:, :, None], np.sin(angles)[:, :, None]

  def norm(x, scale):
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    shape = (1,) * (x.ndim - 1) + scale.shape
    return (
      x / jnp.sqrt(mean_square + config.norm_epsilon) * scale.reshape(shape)
    )

  def heads(p, name, x):
    y = x @ p[name]
    if config.qkv_bias:
      y = y + p[f'{name}_bias'][None, None]
    y = y.reshape(*x.shape[:2], -1, config.head_size)
    if name != 'value':
      if config.qk_norm:
        y = norm(y, p[f'{name}_norm'])
      a, b = jnp.split(y, 2, axis=-1)
      y = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.repeat(y, config.num_heads // y.shape[2], axis=2)

  x = params['embedding'][tokens]
  for i in range(config.num_layers):
    p = {name: value[i] for name, value in params['layers'].items()}
    y = norm(x, p['attention_norm'])
    q, k, v = (heads(p, name, y) for name in ('query', 'key', 'value'))
    scores = jnp.einsum('blhd,bmhd->bhlm', q, k) / np.sqrt(config.head_size)
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    y = jnp.einsum('bhlm,bmhd->blhd', weights, v)
    x = x + y.reshape(*y.shape[:2], -1) @ p['output']
    y = norm(x, p['mlp_norm'])
    x = x + (jax.nn.silu(y @ p['gate']) * (y @ p['up'])) @ p['down']
  x = norm(x, params['final_norm'])
  head = params['embedding' if config.tied_embeddings else 'head']
  log_probs = jax.nn.log_softmax(x @ head.T)
  log_prob = jnp.take_along_axis(log_probs, next_tokens[..., None], axis=-1)
  entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
  value = x @ params['value_head']['kernel'] + params['value_head']['bias']
  return log_prob[..., 0], entropy, value


def loss_terms(log_prob, entropy, value, positions):
  """Summed over all positions and divided by their number, a loss.

  Args:
    log_prob: f32 [...].
    entropy: f32 [...].
    value: f32 [...].
    positions: i32 [...], makes every position's weight differ.
  """
  weight = 1.0 + 0.1 * positions.astype(jnp.float32)
  return weight * (
    -log_prob + 0.5 * jnp.square(value - 0.3) - 0.2 * jnp.square(entropy)
  )


def loss_and_gradients(config, params, batch):
  """The mean of `loss_terms` over all real positions, and its gradients."""

  def loss(params):
    terms = loss_terms(*outputs(config, params, *batch), batch[3])
    is_real = batch[2] > 0
    return jnp.sum(jnp.where(is_real, terms, 0.0)) / float(is_real.sum())

  return jax.jit(jax.value_and_grad(loss))(params)


def make_model(config, compute, sizes):
  data, fsdp, sequence, tensor = sizes
  mesh = mesh_lib.make_mesh(
    jax.devices()[: data * fsdp * sequence * tensor],
    data=data,
    fsdp=fsdp,
    sequence=sequence,
    tensor=tensor,
  )
  return model_lib.make_transformer(config, mesh, compute)


def sharded_step(model, count, num_micro_batches, params, batch):
  """(loss, gradients) of global arrays; `count` is what the loss is over."""

  def loss_share(params, batch):
    own = lambda x: positions_lib.own_from_shard(x, model.mesh)
    terms = loss_terms(*model.apply(params, *batch), own(batch[3]))
    share = jnp.sum(jnp.where(own(batch[2]) > 0, terms, 0.0)) / count
    return share, share

  # Per device: params in shards, batch [B / (data * fsdp), L / sequence].
  def step(params, batch):
    gradients, share = gradients_lib.accumulate(
      loss_share,
      params,
      batch,
      model.param_specs,
      num_micro_batches=num_micro_batches,
    )
    return jax.lax.psum(share, mesh_lib.AXES), gradients

  return mesh_lib.shard_map(
    step,
    mesh=model.mesh,
    in_specs=(model.param_specs, mesh_lib.token_spec()),
    out_specs=(mesh_lib.replicated_spec(), model.param_specs),
  )(params, batch)


def sharded_loss_and_gradients(
  config, compute, sizes, params, batch, num_micro_batches=1
):
  """What `loss_and_gradients` returns, from the real model on a mesh."""
  model = make_model(config, compute, sizes)
  count = float((batch[2] > 0).sum())
  step = functools.partial(sharded_step, model, count, num_micro_batches)
  placed = place(model, params, batch)
  return compile_fast(step, *placed)(*placed)


def sharded_outputs(config, compute, sizes, params, batch):
  """`TokenOutputs` of the real model on a mesh."""
  model = make_model(config, compute, sizes)
  apply = mesh_lib.shard_map(
    model.apply,
    mesh=model.mesh,
    in_specs=(model.param_specs,) + (mesh_lib.token_spec(),) * 4,
    out_specs=mesh_lib.position_spec(),
  )
  params, batch = place(model, params, batch)
  return compile_fast(apply, params, *batch)(params, *batch)


def place(model, params, batch):
  """Global arrays where the model wants them."""
  return (
    jax.device_put(params, shards.shardings(model.mesh, model.param_specs)),
    jax.device_put(
      batch, shards.shardings(model.mesh, (mesh_lib.token_spec(),) * 4)
    ),
  )


def unpack(batch):
  """The same segments, each in a row of its own."""
  rows = []
  for row in zip(*batch):
    for segment in range(1, int(row[2].max()) + 1):
      chosen = row[2] == segment
      pad = np.zeros((~chosen).sum(), np.int32)
      parts = [np.concatenate([x[chosen], pad]) for x in row]
      parts[2] = np.minimum(parts[2], 1)
      rows.append(parts)
  return tuple(np.stack(x) for x in zip(*rows))


_SIXTEEN = """
import jax, oracle
jax.config.update('jax_threefry_partitionable', True)
import dataclasses
config = dataclasses.replace(oracle.ALL_OPTIONS, tied_embeddings=True)
params = oracle.random_params(config)
batch = oracle.packed_batch(config, rows=4, length=16)
loss, gradients = oracle.loss_and_gradients(config, params, batch)
sharded_loss, sharded = oracle.sharded_loss_and_gradients(
  config, oracle.F32, (2, 2, 2, 2), params, batch
)
errors = oracle.relative_errors(sharded, gradients)
assert abs(sharded_loss / loss - 1) < 1e-5, (sharded_loss, loss)
assert max(errors.values()) < 1e-5, errors
"""


def run_on_sixteen_devices(env, path):
  """Compares a mesh of 2 x 2 x 2 x 2 with one device, embeddings tied."""
  here = str(pathlib.Path(__file__).parent)
  python_path = [here, *filter(None, [env.get('PYTHONPATH')])]
  result = subprocess.run(
    [sys.executable, '-c', _SIXTEEN],
    env=env
    | {
      'XLA_FLAGS': '--xla_force_host_platform_device_count=16',
      'PYTHONPATH': os.pathsep.join(python_path),
    },
    cwd=path,
    text=True,
    capture_output=True,
    timeout=110,
  )
  assert result.returncode == 0, result.stderr


def compile_fast(fn, *args):
  """Jitted, with the least of LLVM's work: the shapes are tiny."""
  options = {'xla_backend_optimization_level': 0}
  return jax.jit(fn).lower(*args).compile(compiler_options=options)


def relative_errors(actual, expected):
  """L2 error of each leaf over its norm, by name."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(expected)
  return {
    jax.tree_util.keystr(path): float(
      np.linalg.norm(np.asarray(a) - np.asarray(e)) / np.linalg.norm(e)
    )
    for (path, e), a in zip(leaves, jax.tree_util.tree_leaves(actual))
  }


def cosine(actual, expected):
  """Of all leaves together."""
  a, e = (
    np.concatenate([np.ravel(x) for x in jax.tree_util.tree_leaves(tree)])
    for tree in (actual, expected)
  )
  return float(a @ e / np.linalg.norm(a) / np.linalg.norm(e))
