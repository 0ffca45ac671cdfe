"""What the tests of models share: the reference, and our model's answer."""

import pathlib

import jax
import numpy as np

from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.sharding import mesh as mesh_lib

DATA = pathlib.Path(__file__).parent / 'data'
NAMES = sorted(path.name for path in DATA.iterdir())
COMPUTE = config_lib.ComputeConfig(dtype='float32', attention='reference')


def expected(name):
  """(tokens i32 [2, 24], log-probs f32 [2, 24, V]) of `transformers`."""
  with np.load(DATA / name / 'expected.npz') as file:
    return file['tokens'], np.asarray(jax.nn.log_softmax(file['logits']))


def make_mesh(data=1, fsdp=1, sequence=1, tensor=1):
  sizes = {'data': data, 'fsdp': fsdp, 'sequence': sequence, 'tensor': tensor}
  devices = jax.devices()[: data * fsdp * sequence * tensor]
  return mesh_lib.make_mesh(devices, **sizes)


def log_probs(config, mesh, params, tokens):
  """f32 [B, L, V], by the learner's forward pass: each token asked for."""
  size = config.vocabulary_size
  rows = np.repeat(tokens, size, axis=0)
  wanted = np.tile(np.arange(size, dtype=np.int32), len(tokens))
  places = np.arange(tokens.shape[1], dtype=np.int32)
  model = model_lib.make_transformer(config, mesh, COMPUTE)
  apply = mesh_lib.shard_map(
    model.apply,
    mesh=mesh,
    in_specs=(model.param_specs,) + (mesh_lib.token_spec(),) * 4,
    out_specs=mesh_lib.position_spec(),
  )
  outputs = jax.jit(apply)(
    params,
    rows,
    np.broadcast_to(wanted[:, None], rows.shape),
    np.ones_like(rows),
    np.broadcast_to(places, rows.shape),
  )
  by_token = np.asarray(outputs.log_prob).reshape(len(tokens), size, -1)
  return by_token.swapaxes(1, 2)
