"""Values from layers of their own: two trunks that share nothing."""

import dataclasses

import jax
import numpy as np
import oracle
import pytest

from tunix_reverb.networks.transformer import decoding
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.sharding import mesh as mesh_lib

_CONFIG = dataclasses.replace(oracle.TINY, value_trunk=True)


def _params():
  """Of the policy and, different from them, of the values."""
  policy = oracle.random_params(oracle.TINY)
  jitter = lambda x: x * np.float32(1.3)
  names = ('embedding', 'layers', 'final_norm')
  trunk = jax.tree_util.tree_map(jitter, {n: policy[n] for n in names})
  return policy | {'value_trunk': trunk}


def _apply(model):
  return mesh_lib.shard_map(
    model.apply,
    mesh=model.mesh,
    in_specs=(model.param_specs,) + (mesh_lib.token_spec(),) * 4,
    out_specs=mesh_lib.position_spec(),
  )


@pytest.mark.parametrize('sizes', [(1, 1, 1, 1), (1, 2, 2, 2)])
def test_policy_and_values_are_those_of_two_transformers(sizes):
  data, fsdp, sequence, tensor = sizes
  mesh = mesh_lib.make_mesh(
    jax.devices()[: data * fsdp * sequence * tensor],
    data=data,
    fsdp=fsdp,
    sequence=sequence,
    tensor=tensor,
  )
  model = model_lib.make_transformer(_CONFIG, mesh, oracle.F32)
  params = _params()
  batch = oracle.packed_batch(_CONFIG, rows=2, length=8)
  placed, arrays = oracle.place(model, params, batch)
  actual = oracle.compile_fast(_apply(model), placed, *arrays)(placed, *arrays)
  log_prob, entropy, _ = oracle.outputs(oracle.TINY, params, *batch)
  of_values = params | params['value_trunk']
  _, _, value = oracle.outputs(oracle.TINY, of_values, *batch)
  is_real = batch[2] > 0
  for ours, theirs in zip(actual, (log_prob, entropy, value)):
    np.testing.assert_allclose(
      np.asarray(ours)[is_real], theirs[is_real], rtol=1e-4, atol=1e-5
    )


def test_the_values_move_nothing_of_the_policy():
  mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
  model = model_lib.make_transformer(_CONFIG, mesh, oracle.F32)
  batch = oracle.packed_batch(_CONFIG, rows=2, length=8)
  gradients = jax.jit(
    jax.grad(lambda params: _apply(model)(params, *batch).value.sum())
  )(_params())
  moved = {
    name: any(np.any(x) for x in jax.tree_util.tree_leaves(gradient))
    for name, gradient in gradients.items()
  }
  assert moved.pop('value_trunk') and moved.pop('value_head')
  assert not any(moved.values()), moved


def test_actors_do_without_them():
  shapes = params_lib.shapes(_CONFIG)
  assert shapes['value_trunk'].keys() == {'embedding', 'layers', 'final_norm'}
  assert decoding.prepared_shapes(
    _CONFIG, 'float32'
  ) == decoding.prepared_shapes(oracle.TINY, 'float32')
