"""Layouts of positions, there and back, on a mesh that splits them twice."""

import jax
import numpy as np
import pytest

from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import positions

_P = mesh_lib.PartitionSpec


@pytest.fixture(scope='module')
def mesh():
  return mesh_lib.make_mesh(jax.devices()[:8], data=2, sequence=2, tensor=2)


def _run(fn, mesh, x, in_spec, out_spec):
  sharded = mesh_lib.shard_map(
    fn, mesh=mesh, in_specs=in_spec, out_specs=out_spec
  )
  return jax.jit(sharded)(x)


_X = np.arange(4 * 8, dtype=np.float32).reshape(4, 8)
_ROW = _P(mesh_lib.BATCH_AXES)


@pytest.mark.parametrize(
  'name', ['own_from_shard', 'own_from_row', 'shard_from_own', 'row_from_own']
)
def test_a_change_of_layout_changes_no_value(name, mesh):
  layouts = {
    'own': mesh_lib.position_spec(),
    'shard': mesh_lib.token_spec(),
    'row': _ROW,
  }
  to, source = name.split('_from_')
  fn = getattr(positions, name)
  cut = (lambda x: fn(x, mesh)) if to == 'own' else fn
  out = _run(cut, mesh, _X, layouts[source], layouts[to])
  np.testing.assert_array_equal(out, _X)


def test_row_from_shard(mesh):
  out = _run(positions.row_from_shard, mesh, _X, mesh_lib.token_spec(), _ROW)
  np.testing.assert_array_equal(out, _X)


def test_partial_sums_become_own_positions(mesh):
  out = _run(
    positions.own_from_partial_sums,
    mesh,
    _X,
    mesh_lib.token_spec(),
    mesh_lib.position_spec(),
  )
  np.testing.assert_array_equal(out, 2 * _X)  # One part from each of two.


def test_shard_start(mesh):
  starts = _run(
    lambda x: positions.shard_start(x.shape[1], mesh) + 0 * x[:, :1],
    mesh,
    _X.astype(np.int32),
    mesh_lib.token_spec(),
    mesh_lib.token_spec(),
  )
  np.testing.assert_array_equal(starts, [[0, 4]] * 4)
  alone = mesh_lib.make_mesh(jax.devices()[:1], data=1)
  assert positions.shard_start(8, alone) == 0
