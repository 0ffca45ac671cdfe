"""Meshes and collectives on eight virtual CPU devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb import types
from tunix_reverb.sharding import mesh as mesh_lib

P = mesh_lib.PartitionSpec


def _batch(rows):
  ones = np.ones((rows, 3), np.float32)
  return types.Batch(
    {'a': np.arange(rows * 6, dtype=np.float32).reshape(rows, 3, 2)},
    ones,
    ones,
    ones,
    ones,
    ones,
    ones > 0,
    ones.astype(np.int32),
    ones.astype(np.int32),
    (),
  )


def test_axes_are_in_order_and_named():
  mesh = mesh_lib.make_mesh(
    jax.devices()[:8], data=2, fsdp=1, sequence=2, tensor=2
  )
  assert mesh.axis_names == ('data', 'fsdp', 'sequence', 'tensor')
  assert dict(mesh.shape) == {'data': 2, 'fsdp': 1, 'sequence': 2, 'tensor': 2}
  assert mesh_lib.num_batch_shards(mesh) == 2


@pytest.mark.parametrize(
  'sizes',
  [
    {'data': 3},
    {'data': 4, 'tensor': 4},
    {'data': 0},
    {'data': -8, 'fsdp': -1},
  ],
)
def test_refuses_sizes_that_do_not_fit(sizes):
  with pytest.raises(ValueError, match='must multiply to the number of'):
    mesh_lib.make_mesh(jax.devices()[:8], **sizes)


def test_place_batch_splits_rows_over_data_and_fsdp():
  mesh = mesh_lib.make_mesh(jax.devices()[:8], data=2, fsdp=2, sequence=2)
  host = _batch(8)
  placed = mesh_lib.place_batch(host, mesh)
  shards = placed.observation['a'].addressable_shards
  assert len(shards) == 8
  assert {s.data.shape for s in shards} == {(2, 3, 2)}
  np.testing.assert_array_equal(placed.observation['a'], host.observation['a'])
  assert placed.core_state == ()


def test_place_batch_splits_positions_too_if_asked():
  mesh = mesh_lib.make_mesh(jax.devices()[:8], data=2, sequence=2, tensor=2)
  tokens = np.arange(4 * 6, dtype=np.uint16).reshape(4, 6)
  host = types.Batch(*[tokens] * 9, core_state=(), turn_id=tokens)
  placed = mesh_lib.place_batch(host, mesh, mesh_lib.token_spec())
  for leaf in (placed.observation, placed.turn_id):
    assert {s.data.shape for s in leaf.addressable_shards} == {(2, 3)}
    np.testing.assert_array_equal(leaf, tokens)


def test_place_batch_refuses_uneven_rows():
  mesh = mesh_lib.make_mesh(jax.devices()[:8], data=8)
  with pytest.raises(ValueError, match=r'rows of the batch \(12\) must be a'):
    mesh_lib.place_batch(_batch(12), mesh)


def test_replicate_puts_everything_everywhere():
  mesh = mesh_lib.make_mesh(jax.devices()[:4], data=4)
  x = mesh_lib.replicate({'a': np.ones(3)}, mesh)['a']
  assert x.sharding.is_fully_replicated and len(x.addressable_shards) == 4


def test_global_norm_sees_whole_arrays():
  """A split leaf counts once, a replicated leaf once, on any mesh."""
  mesh = mesh_lib.make_mesh(jax.devices()[:8], data=2, fsdp=2, tensor=2)
  specs = {'split': P(mesh_lib.FSDP, mesh_lib.TENSOR), 'whole': P()}
  tree = {
    'split': np.arange(16, dtype=np.float32).reshape(4, 4),
    'whole': {'a': np.arange(3, dtype=np.float32), 'b': np.float32([7])},
  }
  norm = jax.jit(
    mesh_lib.shard_map(
      lambda tree: mesh_lib.global_norm(tree, specs),
      mesh=mesh,
      in_specs=(specs,),
      out_specs=P(),
    )
  )(tree)
  leaves = jax.tree_util.tree_leaves(tree)
  expected = np.sqrt(sum(np.sum(np.square(x)) for x in leaves))
  np.testing.assert_allclose(norm, expected, rtol=1e-6)


def test_gradient_of_a_share_then_psum_is_the_global_gradient():
  mesh = mesh_lib.make_mesh(jax.devices()[:8], data=4, tensor=2)
  x = np.arange(8, dtype=np.float32)

  def fn(w, x):
    # Devices along `tensor` hold the same x, so half of it is a share.
    gradient = jax.grad(lambda w: jnp.sum(w * x) / 8 / 2)(w)
    return mesh_lib.psum_over_mesh(gradient, mesh_lib.replicated_spec())

  gradient = jax.jit(
    mesh_lib.shard_map(
      fn, mesh=mesh, in_specs=(P(), mesh_lib.batch_spec()), out_specs=P()
    )
  )(jnp.float32(1), x)
  np.testing.assert_allclose(gradient, x.mean())


def test_psum_over_mesh_sums_over_every_axis_a_param_is_not_split_on():
  mesh = mesh_lib.make_mesh(
    jax.devices()[:8], data=2, fsdp=1, sequence=2, tensor=2
  )
  specs = {'split': P(mesh_lib.PARAM_AXES, mesh_lib.TENSOR), 'whole': P()}
  tree = {'split': np.ones((4, 4), np.float32), 'whole': np.ones(3, np.float32)}
  sums = jax.jit(
    mesh_lib.shard_map(
      lambda tree: mesh_lib.psum_over_mesh(tree, specs),
      mesh=mesh,
      in_specs=(specs,),
      out_specs=specs,
    )
  )(tree)
  np.testing.assert_array_equal(sums['split'], 2 * tree['split'])
  np.testing.assert_array_equal(sums['whole'], 8 * tree['whole'])


def test_specs_of_tokens_and_of_positions():
  mesh = mesh_lib.make_mesh(
    jax.devices()[:8], data=2, fsdp=1, sequence=2, tensor=2
  )
  shape = lambda spec: jax.sharding.NamedSharding(mesh, spec).shard_shape(
    (4, 8)
  )
  assert shape(mesh_lib.token_spec()) == (2, 4)
  assert shape(mesh_lib.position_spec()) == (2, 2)
