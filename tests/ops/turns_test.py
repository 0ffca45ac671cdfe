"""Turns against loops over tokens, whole and split over devices."""

import functools

import jax
import numpy as np
import pytest

from tunix_reverb.ops import recurrence
from tunix_reverb.ops import turns
from tunix_reverb.sharding import mesh as mesh_lib


def _rows(length=48, seed=0):
  """Two rows of segments of turns; prompts and tool output are masked."""
  rng = np.random.default_rng(seed)
  segment_ids = np.stack(
    [
      np.repeat([1, 2, 0], [length // 2, length // 3, length // 6]),
      np.ones(length),
    ]
  ).astype(np.int32)
  # Turns of 1 to 13 tokens; an id may come again later.
  changes = rng.random((2, length)) < 0.15
  return {
    'log_rhos': rng.normal(size=(2, length)).astype(np.float32),
    'is_action': rng.random((2, length)) < 0.6,
    'turn_ids': (np.cumsum(changes, axis=1) % 3).astype(np.int32),
    'segment_ids': segment_ids,
  }


def _oracle(log_rhos, is_action, turn_ids, segment_ids):
  totals, lengths = np.zeros(log_rhos.shape), np.zeros(log_rhos.shape)
  is_first = np.zeros(log_rhos.shape, bool)
  for row in range(log_rhos.shape[0]):
    start = 0
    keys = list(zip(segment_ids[row], turn_ids[row]))
    for end in range(1, len(keys) + 1):
      if end < len(keys) and keys[end] == keys[start]:
        continue
      if keys[start][0]:
        actions = [t for t in range(start, end) if is_action[row, t]]
        totals[row, start:end] = sum(float(log_rhos[row, t]) for t in actions)
        lengths[row, start:end] = len(actions)
        is_first[row, actions[:1]] = True
      start = end
  return turns.TurnRatios(totals, lengths, is_first)


def _assert_equal(actual, expected, is_position):
  np.testing.assert_allclose(
    actual.log_rhos[is_position],
    expected.log_rhos[is_position],
    rtol=1e-5,
    atol=1e-5,
  )
  np.testing.assert_array_equal(
    actual.lengths[is_position], expected.lengths[is_position]
  )
  np.testing.assert_array_equal(
    actual.is_first[is_position], expected.is_first[is_position]
  )


@pytest.mark.parametrize('form', ['scan', 'associative'])
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_sums_over_the_action_tokens_of_each_turn(form, seed):
  rows = _rows(seed=seed)
  ratios = jax.jit(
    functools.partial(turns.turn_ratios, rows=recurrence.Rows(form=form))
  )(**rows)
  # At padding there is no turn.
  _assert_equal(ratios, _oracle(**rows), rows['segment_ids'] != 0)


@pytest.mark.parametrize('devices', [2, 8])
def test_turns_that_cross_devices_equal_whole_rows(devices):
  rows = _rows()
  rows['turn_ids'][1] = 1  # One turn over all the devices.
  mesh = mesh_lib.make_mesh(jax.devices()[:devices], data=1, sequence=devices)
  spec = mesh_lib.PartitionSpec(None, mesh_lib.SEQUENCE)
  split = jax.jit(
    mesh_lib.shard_map(
      lambda rows: turns.turn_ratios(
        **rows, rows=recurrence.Rows(axis_name=mesh_lib.SEQUENCE)
      ),
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
    )
  )(rows)
  _assert_equal(split, _oracle(**rows), rows['segment_ids'] != 0)


def test_whatever_lies_on_other_tokens_is_not_read():
  rows = _rows()
  garbage = np.where(rows['is_action'], rows['log_rhos'], np.nan)
  clean = jax.jit(turns.turn_ratios)(**rows)
  dirty = jax.jit(turns.turn_ratios)(**(rows | {'log_rhos': garbage}))
  for before, after in zip(clean, dirty):
    np.testing.assert_array_equal(before, after)
