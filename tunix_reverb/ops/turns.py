"""Turns of a language-model agent: where they begin and how likely they are.

Letters: L positions of a row; `...` rows. A turn is an unbroken run of
positions of one segment with one turn id. Its action tokens are what the
policy chose in it. Rows may be split over a mesh axis, see `recurrence.Rows`.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from tunix_reverb.ops import recurrence


class TurnRatios(NamedTuple):
  """What V-trace needs to know of the turns.

  Attributes:
    log_rhos: f32 [..., L], log importance ratio of the turn around each
      position: the sum over its action tokens; 0 in a turn without any.
    lengths: f32 [..., L], number of action tokens in that turn.
    is_first: bool [..., L], True at the first action token of each turn.
  """

  log_rhos: jax.Array
  lengths: jax.Array
  is_first: jax.Array


def turn_ratios(
  log_rhos: jax.Array,
  is_action: jax.Array,
  turn_ids: jax.Array,
  segment_ids: jax.Array,
  rows: recurrence.Rows = recurrence.WHOLE,
) -> TurnRatios:
  """Multiplies the ratios of the action tokens of each turn.

  Args:
    log_rhos: f32 [..., L], log ratio of each token; only read at actions.
    is_action: bool [..., L].
    turn_ids: i32 [..., L], one id for all positions of a turn, whatever its
      value; the next turn's differs. Prompts and tool output may have ids of
      their own or share a neighbour's; a token inside of a turn that is masked
      must carry the turn's.
    segment_ids: i32 [..., L], 0 is padding.
    rows: how the rows lie on the devices.

  Returns:
    `TurnRatios`.
  """
  chex.assert_equal_shape([log_rhos, is_action, turn_ids, segment_ids])
  chex.assert_type(is_action, bool)
  continues = (
    (turn_ids == rows.from_previous(turn_ids))
    & (segment_ids == rows.from_previous(segment_ids))
    & (segment_ids != 0)
  )
  # [2, ..., L]: log ratios and counts are summed in one go.
  summands = jnp.stack(
    [jnp.where(is_action, log_rhos, 0.0), is_action.astype(jnp.float32)]
  )
  both = lambda x: jnp.broadcast_to(x.astype(jnp.float32), summands.shape)
  up_to_here = rows.solve_forward(summands, both(continues))
  from_here = rows.solve_backward(summands, both(rows.from_next(continues)))
  log_rhos, lengths = up_to_here + from_here - summands
  return TurnRatios(log_rhos, lengths, is_action & (up_to_here[1] == 1.0))
