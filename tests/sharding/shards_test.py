"""Params in shards: made in place, gathered in the compute dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import shards

pytestmark = pytest.mark.slow

_P = mesh_lib.PartitionSpec
_SPECS = {'a': _P(mesh_lib.PARAM_AXES, mesh_lib.TENSOR), 'b': _P()}


def _mesh(**sizes):
  return mesh_lib.make_mesh(jax.devices()[:8], **sizes)


def _init(key):
  return {'a': jax.random.normal(key, (8, 6)), 'b': jnp.ones(3)}


def test_created_params_lie_in_shards_and_do_not_depend_on_the_mesh():
  key = jax.random.PRNGKey(3)
  expected = _init(key)
  for sizes in (
    {'data': 8},
    {'data': 1, 'fsdp': 2, 'sequence': 2, 'tensor': 2},
  ):
    mesh = _mesh(**sizes)
    params = shards.create(_init, mesh, _SPECS, key=key)
    for name, spec in _SPECS.items():
      sharding = jax.sharding.NamedSharding(mesh, spec)
      assert params[name].sharding.is_equivalent_to(sharding, 2)
      np.testing.assert_allclose(params[name], expected[name], rtol=1e-6)
  assert params['a'].addressable_shards[0].data.shape == (2, 3)


def _gather_fn(mesh, dtype):
  # Per device: [2, 3] -> [8, 3].
  return mesh_lib.shard_map(
    lambda x: shards.gather(x, _SPECS['a'], dtype),
    mesh=mesh,
    in_specs=_SPECS['a'],
    out_specs=_P(None, mesh_lib.TENSOR),
  )


def test_gather_puts_rows_in_order_and_leaves_tensor_split():
  mesh = _mesh(data=1, fsdp=2, sequence=2, tensor=2)
  x = np.arange(48, dtype=np.float32).reshape(8, 6)
  np.testing.assert_array_equal(jax.jit(_gather_fn(mesh, x.dtype))(x), x)


def test_what_travels_is_in_the_compute_dtype():
  """The cast comes before the gather, and before the gradient's reduction."""
  mesh = _mesh(data=1, fsdp=2, sequence=2, tensor=2)
  total = lambda x: jnp.sum(_gather_fn(mesh, jnp.bfloat16)(x))
  x = jax.ShapeDtypeStruct((8, 6), jnp.float32)
  text = str(jax.make_jaxpr(jax.grad(total))(x))
  (gather,) = [t for t in text.splitlines() if '= all_gather[' in t]
  (scatter,) = [t for t in text.splitlines() if '= reduce_scatter[' in t]
  assert 'bf16[8,3] = ' in gather
  assert 'bf16[2,3] = ' in scatter
