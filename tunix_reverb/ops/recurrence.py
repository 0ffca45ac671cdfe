"""First-order linear recurrences along rows, whole or split over a mesh axis.

Letters: L positions of a row; `...` rows. Batches [..., L] are taken as they
are, without `vmap`: the scan runs with time first, and one transposition for
all rows is what it costs to get there.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

Form = Literal['auto', 'scan', 'associative']

# Positions per round of the loop. Measured on CPU: at [8, 16384] half the time
# of a loop over single positions; `lax.scan(unroll=4)` gains nothing, because
# it splits the positions up after the transposition.
_UNROLL = 4
# On an accelerator a round of a loop costs about what a level of the tree does,
# and up to here the tree has as many kernels as the loop has rounds.
_SHORT = 32
_MAX = float(np.finfo(np.float32).max)

_Solver = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
  """How rows lie on the devices, and what can be done along them.

  Attributes:
    axis_name: inside `shard_map`, the mesh axis over which the rows are split:
      the devices along it hold equal, consecutive parts of each row, in order,
      and L is the length of a part. None if each device holds whole rows.
    form: how recurrences are solved. 'scan' is a loop over the positions with
      the fewest operations, 'associative' a tree of depth log L with about
      twice as many. 'auto' is the loop on CPU and for short rows, the tree
      elsewhere; it is decided when a program is lowered, for the platform that
      it is lowered for.
  """

  axis_name: str | None = None
  form: Form = 'auto'

  def __post_init__(self) -> None:
    if self.form not in ('auto', 'scan', 'associative'):
      raise ValueError(
        f"form ({self.form}) must be 'auto', 'scan' or 'associative'"
      )

  def solve_backward(
    self, increments: jax.Array, coefficients: jax.Array
  ) -> jax.Array:
    """Solves y_t = increments_t + coefficients_t y_{t+1}, from 0 at the end.

    Over devices it composes: a part of a row acts on what comes from its right
    as y -> total + product y, so two scalars per row and device are exchanged.

    Args:
      increments: f32 [..., L].
      coefficients: f32 [..., L].

    Returns:
      f32 [..., L].
    """
    return self._solve(increments, coefficients, is_forward=False)

  def solve_forward(
    self, increments: jax.Array, coefficients: jax.Array
  ) -> jax.Array:
    """Solves y_t = increments_t + coefficients_t y_{t-1}, from 0 at the start.

    See `solve_backward`.
    """
    flip = lambda x: jnp.flip(x, axis=-1)
    return flip(
      self._solve(flip(increments), flip(coefficients), is_forward=True)
    )

  def from_next(self, x: jax.Array) -> jax.Array:
    """x_{t+1} at t, 0 at the end; x: [..., L] of any dtype."""
    beyond = self._edge_of_neighbour(x[..., :1], step=-1)
    return jnp.concatenate([x[..., 1:], beyond], axis=-1)

  def from_previous(self, x: jax.Array) -> jax.Array:
    """x_{t-1} at t, 0 at the start; x: [..., L] of any dtype."""
    before = self._edge_of_neighbour(x[..., -1:], step=1)
    return jnp.concatenate([before, x[..., :-1]], axis=-1)

  def _solve(
    self, increments: jax.Array, coefficients: jax.Array, *, is_forward: bool
  ) -> jax.Array:
    """Solves from right to left; forward, the arrays come in flipped."""
    chex.assert_equal_shape([increments, coefficients])
    chex.assert_type([increments, coefficients], jnp.float32)
    solve = _solver(self.form, increments.shape[-1])
    if self.axis_name is None:
      return solve(increments, coefficients)
    incoming = _incoming(
      increments, coefficients, solve, self.axis_name, is_forward=is_forward
    )
    # The last position takes what comes in; the rest is as on one device.
    last = increments[..., -1:] + coefficients[..., -1:] * incoming[..., None]
    increments = jnp.concatenate([increments[..., :-1], last], axis=-1)
    return solve(increments, coefficients)

  def _edge_of_neighbour(self, edge: jax.Array, *, step: int) -> jax.Array:
    """`edge` of the device that is `step` before this one; 0 at the ends."""
    if self.axis_name is None:
      return jnp.zeros_like(edge)
    size = jax.lax.psum(1, self.axis_name)
    pairs = [(i, i + step) for i in range(size) if 0 <= i + step < size]
    is_bool = edge.dtype == jnp.bool_
    # Not every transport between processes carries booleans.
    sent = edge.astype(jnp.int32) if is_bool else edge
    received = jax.lax.ppermute(sent, self.axis_name, pairs)
    return received.astype(jnp.bool_) if is_bool else received


# Each device holds whole rows.
WHOLE = Rows()


def _solver(form: Form, length: int) -> _Solver:
  if form == 'scan' or (form == 'auto' and length <= _SHORT):
    return _scan
  if form == 'associative':
    return _associative
  return lambda increments, coefficients: jax.lax.platform_dependent(
    increments, coefficients, cpu=_scan, default=_associative
  )


def _scan(increments: jax.Array, coefficients: jax.Array) -> jax.Array:
  """Loops from right to left over blocks of `_UNROLL` positions of all rows."""
  *rows, length = increments.shape
  unroll = min(_UNROLL, length)
  # Zeros on the right: what comes from there is 0 either way.
  widths = [(0, 0)] * len(rows) + [(0, -length % unroll)]

  def time_first(x: jax.Array) -> jax.Array:
    blocks = jnp.pad(x, widths).reshape(*rows, -1, unroll)
    return jnp.moveaxis(blocks, (-2, -1), (0, 1))

  def body(
    y: jax.Array, block: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    solved = []
    for t in reversed(range(unroll)):
      y = block[0][t] + block[1][t] * y
      solved.append(y)
    return y, jnp.stack(solved[::-1])

  _, solution = jax.lax.scan(
    body,
    jnp.zeros(rows, jnp.float32),
    (time_first(increments), time_first(coefficients)),
    reverse=True,
  )
  solution = jnp.moveaxis(solution, (0, 1), (-2, -1))
  return solution.reshape(*rows, -1)[..., :length]


def _associative(increments: jax.Array, coefficients: jax.Array) -> jax.Array:
  def combine(
    right: tuple[jax.Array, jax.Array], left: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, jax.Array]:
    return (
      _bounded_product(left[0], right[0]),
      left[1] + left[0] * right[1],
    )

  _, solution = jax.lax.associative_scan(
    combine,
    (coefficients, increments),
    reverse=True,
    axis=increments.ndim - 1,
  )
  return solution


def _bounded_product(x: jax.Array, y: jax.Array) -> jax.Array:
  # An infinite product would turn into NaN at the next coefficient of 0, that
  # is at the border of a segment.
  return jnp.clip(x * y, -_MAX, _MAX)


def _incoming(
  increments: jax.Array,
  coefficients: jax.Array,
  solve: _Solver,
  axis_name: str,
  *,
  is_forward: bool,
) -> jax.Array:
  """f32 [...], the solution at the first position beyond this device's."""
  product = jax.lax.reduce(
    coefficients,
    np.float32(1.0),
    _bounded_product,
    (coefficients.ndim - 1,),
  )
  total = solve(increments, coefficients)[..., 0]
  # [2, ..., devices]
  gathered = jax.lax.all_gather(
    jnp.stack([total, product]), axis_name, axis=total.ndim + 1
  )
  index = jax.lax.axis_index(axis_name)
  if is_forward:
    gathered = jnp.flip(gathered, axis=-1)
    index = jax.lax.psum(1, axis_name) - 1 - index
  firsts = WHOLE.from_next(_scan(gathered[0], gathered[1]))
  return jax.lax.dynamic_index_in_dim(firsts, index, axis=-1, keepdims=False)
