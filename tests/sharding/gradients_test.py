"""Gradients on a mesh, the traps on the way, and clipping them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tunix_reverb.learner import optimiser
from tunix_reverb.sharding import gradients as gradients_lib
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import shards

pytestmark = pytest.mark.slow

_P = mesh_lib.PartitionSpec
# One param whose rows are split and gathered, one that is split over tensor
# and stays so, one that is whole.
_SPECS = {
  'gathered': _P(mesh_lib.PARAM_AXES),
  'split': _P(None, mesh_lib.TENSOR),
  'whole': _P(),
}


@pytest.fixture(scope='module')
def mesh():
  return mesh_lib.make_mesh(
    jax.devices()[:8], data=1, fsdp=2, sequence=2, tensor=2
  )


def _params():
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {'gathered': normal(4, 6), 'split': normal(6, 4), 'whole': normal(4)}


def _batch():
  return np.random.default_rng(1).normal(size=(8, 4, 4)).astype(np.float32)


def _whole_loss(params, x):
  """[B, L, 4] -> []; every param and every position takes part."""
  y = jnp.tanh(x @ params['gathered']) @ params['split']
  return jnp.sum(jnp.square(y * params['whole'][None, None])) / 32


def _loss_share(params, x):
  """The same inside `shard_map`: x [b, l, 4], a fourth of it per position."""
  kernel = shards.gather(params['gathered'], _SPECS['gathered'], x.dtype)
  y = jnp.tanh(x @ kernel) @ params['split']  # [b, l, 4 / tensor]
  part = params['whole'].reshape(2, -1)[jax.lax.axis_index(mesh_lib.TENSOR)]
  share = jnp.sum(jnp.square(y * part[None, None])) / 32
  return share, share


def _run(fn, mesh):
  # Per device: params in shards, x [B / fsdp, L / sequence, 4].
  sharded = mesh_lib.shard_map(
    fn,
    mesh=mesh,
    in_specs=(_SPECS, mesh_lib.token_spec()),
    out_specs=(_SPECS, _P()),
  )
  return jax.jit(sharded)(_params(), _batch())


@pytest.mark.parametrize('num_micro_batches', [1, 2, 4])
def test_equal_one_device_whatever_the_micro_batches(num_micro_batches, mesh):
  def fn(params, x):
    gradients, share = gradients_lib.accumulate(
      _loss_share, params, x, _SPECS, num_micro_batches=num_micro_batches
    )
    return gradients, jax.lax.psum(share, mesh_lib.AXES)

  gradients, loss = _run(fn, mesh)
  expected = jax.value_and_grad(_whole_loss)(_params(), _batch())
  np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
  for name, gradient in gradients.items():
    np.testing.assert_allclose(
      gradient, expected[1][name], rtol=1e-5, atol=1e-6, err_msg=name
    )


def test_gradients_of_a_summed_loss_are_eight_times_too_large(mesh):
  """The trap: if this fails, JAX has changed and the convention may too."""

  def fn(params, x):
    summed = lambda p, x: (
      jax.lax.psum(_loss_share(p, x)[0], mesh_lib.AXES),
      (),
    )
    gradients, _ = gradients_lib.accumulate(summed, params, x, _SPECS)
    return gradients, jnp.float32(0)

  gradients, _ = _run(fn, mesh)
  expected = jax.grad(_whole_loss)(_params(), _batch())
  for name, gradient in gradients.items():
    np.testing.assert_allclose(
      gradient, 8 * expected[name], rtol=1e-5, atol=1e-5, err_msg=name
    )


def test_micro_batches_must_divide_the_rows(mesh):
  fn = functools.partial(
    gradients_lib.accumulate,
    _loss_share,
    param_specs=_SPECS,
    num_micro_batches=3,
  )
  with pytest.raises(ValueError, match=r'num_micro_batches \(3\) must divide'):
    _run(fn, mesh)


def _clipped(clip, mesh, **kwargs):
  def fn(params, x):
    del x
    known = {name: norm(params) for name, norm in kwargs.items()}
    clipped, _ = clip.update(params, clip.init(params), **known)
    return clipped, jnp.float32(0)

  return _run(fn, mesh)[0]


def test_clip_sees_the_norm_of_whole_gradients(mesh):
  """The other trap: optax's own clip sees shards, each device its own."""
  clip = optimiser.clip_by_global_norm(1.0)
  params = _params()
  norm = np.sqrt(sum(np.sum(np.square(x)) for x in params.values()))
  assert norm > 2
  of_all = lambda tree: mesh_lib.global_norm(tree, _SPECS)
  for name, clipped in _clipped(clip, mesh, grad_norm=of_all).items():
    np.testing.assert_allclose(clipped, params[name] / norm, rtol=1e-6)

  wrong = _clipped(optax.clip_by_global_norm(1.0), mesh)
  total = np.sqrt(sum(np.sum(np.square(x)) for x in wrong.values()))
  assert total > 1.3  # Not clipped to 1 at all.
