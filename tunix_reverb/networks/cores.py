"""Recurrent cores: features over time in, outputs over time out.

A core splits its work in two. `project` is everything that does not depend on
the recurrent state, one matrix product over all positions at once; `advance`
is what must wait for the previous position. Only `advance` runs in the scan.

Letters: K environments or rows, L positions, D input and H core size.
"""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp

from tunix_reverb import types


class FeedForward(nn.Module):
  """No recurrence; its state is `()`."""

  def state_spec(self) -> types.Nest:
    return ()

  def step(
    self, features: jax.Array, state: types.Nest
  ) -> tuple[jax.Array, types.Nest]:
    """See `_Recurrent.step`."""
    return features, state

  def unroll(
    self, features: jax.Array, initial_state: types.Nest, is_start: jax.Array
  ) -> jax.Array:
    """See `_Recurrent.unroll`."""
    del initial_state, is_start
    return features


class _Recurrent(nn.Module):
  """What LSTM and GRU share: one step, and the scan over a row."""

  size: int

  def state_spec(self) -> types.Nest:
    """Nest of `jax.ShapeDtypeStruct` of one unbatched state."""
    raise NotImplementedError

  def project(self, features: jax.Array) -> jax.Array:
    """[..., D] -> [..., G], before the state is known."""
    raise NotImplementedError

  def advance(
    self, projected: jax.Array, state: types.Nest
  ) -> tuple[jax.Array, types.Nest]:
    """([K, G], state of [K, H]) -> (output [K, H], next state)."""
    raise NotImplementedError

  def step(
    self, features: jax.Array, state: types.Nest
  ) -> tuple[jax.Array, types.Nest]:
    """One position of K streams: [K, D] -> (output [K, H], next state)."""
    return self.advance(self.project(features), state)

  def unroll(
    self, features: jax.Array, initial_state: types.Nest, is_start: jax.Array
  ) -> jax.Array:
    """All positions of K rows.

    Args:
      features: f32 [K, L, D].
      initial_state: nest of [K, L, H]; where `is_start`, the state before that
        position. Ignored elsewhere.
      is_start: bool [K, L], True at the first position of each segment.

    Returns:
      f32 [K, L, H].
    """
    time_major = lambda x: jnp.swapaxes(x, 0, 1)
    inputs = jax.tree_util.tree_map(
      time_major, (self.project(features), initial_state, is_start)
    )
    zeros = jax.tree_util.tree_map(
      lambda x: jnp.zeros_like(x[:, 0]), initial_state
    )

    def body(
      state: types.Nest, inputs: tuple[jax.Array, types.Nest, jax.Array]
    ) -> tuple[types.Nest, jax.Array]:
      projected, initial, is_start = inputs
      output, state = self.advance(
        projected, select_state(is_start, initial, state)
      )
      return state, output

    _, outputs = jax.lax.scan(body, zeros, inputs)
    return time_major(outputs)


class LSTM(_Recurrent):
  """Long short-term memory (Hochreiter & Schmidhuber 1997), forget bias 1."""

  def setup(self) -> None:
    self.input = nn.Dense(4 * self.size)
    self.recurrent_kernel = self.param(
      'recurrent_kernel',
      nn.initializers.lecun_normal(),
      (self.size, 4 * self.size),
    )

  def state_spec(self) -> types.Nest:
    spec = jax.ShapeDtypeStruct((self.size,), jnp.float32)
    return {'cell': spec, 'hidden': spec}

  def project(self, features: jax.Array) -> jax.Array:
    return self.input(features)

  def advance(
    self, projected: jax.Array, state: types.Nest
  ) -> tuple[jax.Array, types.Nest]:
    gates = projected + state['hidden'] @ self.recurrent_kernel
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    cell = nn.sigmoid(f + 1.0) * state['cell'] + nn.sigmoid(i) * jnp.tanh(g)
    hidden = nn.sigmoid(o) * jnp.tanh(cell)
    return hidden, {'cell': cell, 'hidden': hidden}


class GRU(_Recurrent):
  """Gated recurrent unit (Cho et al. 2014), reset after the product."""

  def setup(self) -> None:
    self.input = nn.Dense(3 * self.size)
    self.recurrent_kernel = self.param(
      'recurrent_kernel',
      nn.initializers.lecun_normal(),
      (self.size, 3 * self.size),
    )

  def state_spec(self) -> types.Nest:
    return {'hidden': jax.ShapeDtypeStruct((self.size,), jnp.float32)}

  def project(self, features: jax.Array) -> jax.Array:
    return self.input(features)

  def advance(
    self, projected: jax.Array, state: types.Nest
  ) -> tuple[jax.Array, types.Nest]:
    hidden = state['hidden']
    r_in, z_in, n_in = jnp.split(projected, 3, axis=-1)
    r_rec, z_rec, n_rec = jnp.split(hidden @ self.recurrent_kernel, 3, axis=-1)
    z = nn.sigmoid(z_in + z_rec)
    candidate = jnp.tanh(n_in + nn.sigmoid(r_in + r_rec) * n_rec)
    hidden = (1.0 - z) * candidate + z * hidden
    return hidden, {'hidden': hidden}


def select_state(
  condition: jax.Array, on_true: types.Nest, on_false: types.Nest
) -> types.Nest:
  """Leaf by leaf [K, ...], `on_true` where `condition` bool [K]."""
  return jax.tree_util.tree_map(
    lambda a, b: jnp.where(
      condition.reshape(condition.shape + (1,) * (a.ndim - 1)), a, b
    ),
    on_true,
    on_false,
  )


def make_core(name: str, *, size: int) -> nn.Module:
  """Builds the core `name`: 'none', 'lstm' or 'gru'.

  Raises:
    ValueError: an unknown name.
  """
  if name == 'none':
    return FeedForward()
  if name == 'lstm':
    return LSTM(size)
  if name == 'gru':
    return GRU(size)
  raise ValueError(f'core ({name!r}) must be none, lstm or gru')
