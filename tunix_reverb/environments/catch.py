"""Catch: move a paddle under a falling ball. The default environment.

The rules are bsuite's (Osband et al. 2019, arXiv:1908.03568): a 10 x 5 board,
one ball that falls a row per step, one paddle on the last row, reward +1 for a
catch and -1 for a miss when the ball arrives, 9 transitions per episode. The
random policy scores about -0.6, a perfect one +1.

There are only 10 * 5 * 5 boards, so every `TimeStep` is built once, at import,
and shared: a step allocates nothing. Observations are read-only for that
reason.
"""

from __future__ import annotations

import random
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

ROWS = 10
COLUMNS = 5
# Column of the paddle after each action: left, stay, right.
_MOVES = tuple(
  tuple(min(max(column + d, 0), COLUMNS - 1) for d in (-1, 0, 1))
  for column in range(COLUMNS)
)


class Catch(dm_env.Environment):
  """Observation f32 [10, 5] of zeros and ones; actions left, stay, right."""

  def __init__(self, *, seed: int):
    """Args: seed: of the columns the balls fall in, int."""
    self._random = random.Random(seed)
    self._row = ROWS - 1  # As after LAST: the first step resets.
    self._ball = 0
    self._paddle = 0

  def reset(self) -> dm_env.TimeStep:
    self._row = 0
    self._ball = int(self._random.random() * COLUMNS)
    self._paddle = COLUMNS // 2
    return _TIMESTEPS[0][self._ball][self._paddle]

  def step(self, action: Any) -> dm_env.TimeStep:
    """`action` is 0 (left), 1 (stay) or 2 (right)."""
    if self._row == ROWS - 1:
      return self.reset()
    self._row += 1
    self._paddle = _MOVES[self._paddle][action]
    return _TIMESTEPS[self._row][self._ball][self._paddle]

  # The vector environments' protocol (see `canonical`): a step is as cheap as
  # it gets.
  step_raw = step

  def observation_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray(
      (ROWS, COLUMNS), np.float32, 0.0, 1.0, name='board'
    )

  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(3, dtype=np.int32, name='action')

  def reward_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, -1.0, 1.0, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='discount')


def _timestep(row: int, ball: int, paddle: int) -> dm_env.TimeStep:
  """The one timestep with this board."""
  board = np.zeros((ROWS, COLUMNS), np.float32)
  board[row, ball] = 1.0
  board[ROWS - 1, paddle] = 1.0
  board.flags.writeable = False
  if row == 0:
    return dm_env.restart(board)
  if row == ROWS - 1:
    reward = np.float32(1.0 if ball == paddle else -1.0)
    return dm_env.TimeStep(dm_env.StepType.LAST, reward, np.float32(0.0), board)
  return dm_env.TimeStep(
    dm_env.StepType.MID, np.float32(0.0), np.float32(1.0), board
  )


_TIMESTEPS = tuple(
  tuple(
    tuple(_timestep(row, ball, paddle) for paddle in range(COLUMNS))
    for ball in range(COLUMNS)
  )
  for row in range(ROWS)
)
