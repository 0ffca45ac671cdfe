"""Recurrences against a float64 loop, in every form and split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tunix_reverb.ops import recurrence
from tunix_reverb.sharding import mesh as mesh_lib

_FORMS = ('scan', 'associative', 'auto')
_ROW_SPEC = mesh_lib.PartitionSpec(None, mesh_lib.SEQUENCE)


def _inputs(*shape, seed=0):
  rng = np.random.default_rng(seed)
  increments = rng.normal(size=shape).astype(np.float32)
  coefficients = rng.uniform(-0.5, 1.05, size=shape).astype(np.float32)
  # As at the borders of segments.
  coefficients[rng.random(shape) < 0.1] = 0.0
  return increments, coefficients


def _oracle(increments, coefficients):
  """Backwards, in float64."""
  b, a = (np.asarray(x, np.float64) for x in (increments, coefficients))
  solution, y = np.zeros_like(b), np.zeros(b.shape[:-1])
  for t in reversed(range(b.shape[-1])):
    y = solution[..., t] = b[..., t] + a[..., t] * y
  return solution


def _split(fn, devices: int):
  """`fn(rows, *arrays [B, L])` with L split over `devices` devices."""
  mesh = mesh_lib.make_mesh(jax.devices()[:devices], data=1, sequence=devices)
  rows = recurrence.Rows(axis_name=mesh_lib.SEQUENCE)
  return jax.jit(
    mesh_lib.shard_map(
      functools.partial(fn, rows),
      mesh=mesh,
      in_specs=_ROW_SPEC,
      out_specs=_ROW_SPEC,
    )
  )


# One position, less than a round of the loop, several with a rest, and more
# than what counts as short.
@pytest.mark.parametrize('length', [1, 3, 14, 57])
@pytest.mark.parametrize('form', _FORMS)
def test_matches_a_float64_loop_in_both_directions(form, length):
  increments, coefficients = _inputs(2, 3, length)
  rows = recurrence.Rows(form=form)
  backward, forward = jax.jit(
    lambda *x: (rows.solve_backward(*x), rows.solve_forward(*x))
  )(increments, coefficients)
  flip = lambda x: np.flip(x, axis=-1)
  np.testing.assert_allclose(
    backward, _oracle(increments, coefficients), rtol=1e-5, atol=1e-5
  )
  np.testing.assert_allclose(
    forward,
    flip(_oracle(flip(increments), flip(coefficients))),
    rtol=1e-5,
    atol=1e-5,
  )


def test_a_batch_equals_its_rows_and_vmap():
  increments, coefficients = _inputs(4, 37)
  solve = recurrence.WHOLE.solve_backward
  batch = jax.jit(solve)(increments, coefficients)
  np.testing.assert_array_equal(
    batch, jax.jit(jax.vmap(solve))(increments, coefficients)
  )
  np.testing.assert_array_equal(
    batch[2], jax.jit(solve)(increments[2], coefficients[2])
  )


@pytest.mark.parametrize('devices', [1, 2, 8])
def test_split_rows_equal_whole_rows(devices):
  inputs = _inputs(3, 48)

  def everything(rows, increments, coefficients):
    return (
      rows.solve_backward(increments, coefficients),
      rows.solve_forward(increments, coefficients),
      rows.from_next(increments),
      rows.from_previous(increments),
      rows.from_next(coefficients == 0),
      jax.vmap(rows.solve_backward)(increments, coefficients),
    )

  whole = jax.jit(functools.partial(everything, recurrence.WHOLE))(*inputs)
  for expected, actual in zip(whole, _split(everything, devices)(*inputs)):
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_value_crosses_every_device():
  """Without a boundary, what enters at one end leaves at the other, exactly."""
  increments = np.zeros((1, 32), np.float32)
  increments[0, -1] = 3.0
  ones = np.ones_like(increments)
  solve = _split(lambda rows, *x: rows.solve_backward(*x), 8)
  np.testing.assert_array_equal(solve(increments, ones), 3 * ones)


def test_neighbours_are_zero_beyond_the_ends():
  x = np.arange(1, 5, dtype=np.int32)
  np.testing.assert_array_equal(recurrence.WHOLE.from_next(x), [2, 3, 4, 0])
  np.testing.assert_array_equal(recurrence.WHOLE.from_previous(x), [0, 1, 2, 3])


@pytest.mark.parametrize('split', [False, True])
def test_a_product_beyond_float32_stays_in_its_segment(split):
  """Ratios of e^20 without a clip: their product is no float32."""
  coefficients = np.full((1, 64), 4e8, np.float32)
  coefficients[0, ::16] = 0.0
  increments = np.zeros_like(coefficients)
  increments[0, 1::16] = 1.0
  solve = (
    _split(lambda rows, *x: rows.solve_backward(*x), 8)
    if split
    else recurrence.Rows(form='associative').solve_backward
  )
  np.testing.assert_array_equal(solve(increments, coefficients), increments)


def test_a_row_of_128k_keeps_the_precision_of_float32():
  increments, _ = _inputs(1, 2**17)
  coefficients = np.full_like(increments, 0.999)
  oracle = _oracle(increments, coefficients)
  scale = np.abs(oracle).max()
  for form in ('scan', 'associative'):
    solve = jax.jit(recurrence.Rows(form=form).solve_backward)
    error = np.abs(solve(increments, coefficients) - oracle).max()
    # The powers of one number that the tree takes round all the same way.
    assert error < 1e-5 * scale, form


def test_auto_is_the_loop_on_cpu():
  x = jax.ShapeDtypeStruct((2, 64), jnp.float32)
  text = lambda form: (
    jax.jit(recurrence.Rows(form=form).solve_backward)
    .lower(x, x)
    .compile()
    .as_text()
  )
  assert ' while(' in text('auto')
  # Decided, not at run time.
  assert 'conditional' not in text('auto')
  assert ' while(' not in text('associative')


def test_auto_is_the_tree_elsewhere_but_for_short_rows():
  def choice(length: int, platform: str) -> jax.Array:
    x = jnp.ones((2, length), jnp.float32)
    solve = recurrence.WHOLE.solve_backward
    lowered = jax.jit(solve).trace(x, x).lower(lowering_platforms=(platform,))
    return lowered.as_text()

  # Older JAX lowers both branches and an index of the one to take.
  branches = lambda text: text.count('stablehlo.case')
  assert branches(choice(64, 'tpu')) and not branches(choice(32, 'tpu'))
  is_constant = 'stablehlo.constant dense<1> : tensor<i32>'
  specialised = 'stablehlo.while' not in choice(64, 'tpu')
  assert specialised or is_constant in choice(64, 'tpu')
  assert 'stablehlo.while' in choice(64, 'cpu')


def test_refuses_what_it_cannot_solve():
  increments, coefficients = _inputs(2, 8)
  with pytest.raises(ValueError, match="form \\(fast\\) must be 'auto'"):
    recurrence.Rows(form='fast')
  with pytest.raises(AssertionError):
    recurrence.WHOLE.solve_backward(increments, coefficients[:, 1:])
  with pytest.raises(AssertionError):
    recurrence.WHOLE.solve_backward(
      jnp.asarray(increments, jnp.bfloat16),
      jnp.asarray(coefficients, jnp.bfloat16),
    )
