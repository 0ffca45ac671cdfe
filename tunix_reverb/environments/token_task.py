"""Small tasks whose timesteps are tokens, for a transformer from scratch.

An episode is a prompt of symbols, a separator, and the policy's answer, which
is the prompt's symbols in the task's order and the end token:

  reverse:  4 7 5 SEPARATOR -> 5 7 4 END

A timestep is one token and an action is the next one. While the prompt goes on
the environment takes its own next token, whatever the action was. Observations
say so: `loss_mask` is True where the policy chooses the next token, `turn_id`
is 0 in the prompt and 1 in the answer. The reward comes with the last token:
the fraction of the answer's tokens that are right, END among them. The episode
ends with END or when the answer is as long as it should be. A random policy
scores about 1 / 16, a perfect one 1.
"""

from __future__ import annotations

import random
from typing import Any

import dm_env
from dm_env import specs
import numpy as np

from tunix_reverb import errors
from tunix_reverb import specs as specs_lib

END = 0
SEPARATOR = 1
FIRST_SYMBOL = 2
NUM_SYMBOLS = 8
# A power of two, so that it divides over devices.
VOCABULARY_SIZE = 16
TASKS = ('copy', 'reverse')
_MIN_SYMBOLS = 2
_DEFAULT_MAX_SYMBOLS = 4
_TOKEN_DTYPE = specs_lib.smallest_integer_dtype(0, VOCABULARY_SIZE - 1)


class TokenTask(dm_env.Environment):
  """Prompts of 2 to `max_symbols` symbols, each length as often."""

  def __init__(self, task: str, *, max_symbols: int, seed: int):
    """Makes one.

    Args:
      task: 'copy' or 'reverse'.
      max_symbols: of a prompt; an episode has up to 2 `max_symbols` + 1
        transitions.
      seed: of the prompts, int.
    """
    self._reverses = task == 'reverse'
    self._max_symbols = max_symbols
    self._random = random.Random(seed)
    self._prompt: list[int] = []
    self._answer: list[int] = []
    self._written = 0  # Tokens after the first one.
    self._right = 0
    self._is_over = True

  def reset(self) -> dm_env.TimeStep:
    draw = self._random.random
    count = _MIN_SYMBOLS + int(draw() * (self._max_symbols - _MIN_SYMBOLS + 1))
    symbols = [FIRST_SYMBOL + int(draw() * NUM_SYMBOLS) for _ in range(count)]
    self._prompt = [*symbols, SEPARATOR]
    self._answer = [*(symbols[::-1] if self._reverses else symbols), END]
    self._written, self._right, self._is_over = 0, 0, False
    return dm_env.restart(self._observation(symbols[0]))

  def step(self, action: Any) -> dm_env.TimeStep:
    """`action` is the next token, where the policy chooses it."""
    if self._is_over:
      return self.reset()
    return dm_env.TimeStep(*self.step_raw(action))

  def step_raw(self, action: Any) -> tuple:
    """As `step`, of a running episode (see `canonical`)."""
    self._written += 1
    index = self._written - len(self._prompt)
    if index < 0:
      token = self._prompt[self._written]
      return _MID, _NO_REWARD, _ONE, self._observation(token)
    token = int(action)
    self._right += token == self._answer[index]
    self._is_over = token == END or index + 1 == len(self._answer)
    observation = self._observation(token)
    if self._is_over:
      reward = np.float32(self._right / len(self._answer))
      return _LAST, reward, _NO_REWARD, observation
    return _MID, _NO_REWARD, _ONE, observation

  def _observation(self, token: int) -> dict[str, Any]:
    is_answer = self._written + 1 >= len(self._prompt)
    return {
      'token': _TOKENS[token],
      'loss_mask': _BOOLS[is_answer],
      'turn_id': _TURNS[is_answer],
    }

  def observation_spec(self) -> dict[str, specs.Array]:
    return {
      'token': specs.BoundedArray(
        (), _TOKEN_DTYPE, 0, VOCABULARY_SIZE - 1, name='token'
      ),
      'loss_mask': specs.BoundedArray((), np.bool_, 0, 1, name='loss_mask'),
      'turn_id': specs.BoundedArray((), np.int32, 0, 1, name='turn_id'),
    }

  def action_spec(self) -> specs.DiscreteArray:
    return specs.DiscreteArray(VOCABULARY_SIZE, dtype=np.int32, name='action')

  def reward_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='reward')

  def discount_spec(self) -> specs.BoundedArray:
    return specs.BoundedArray((), np.float32, 0.0, 1.0, name='discount')


def make(name: str, seed: int) -> TokenTask:
  """Makes `<task>` or `<task>/<max_symbols>`, such as reverse/8.

  Raises:
    errors.UserError: there is no such task, or the number is none.
  """
  task, separator, text = name.partition('/')
  if task not in TASKS:
    raise errors.UserError(
      f'token task ({task!r}) must be one of {", ".join(TASKS)}'
    )
  max_symbols = int(text) if text.isdecimal() else 0
  if not separator:
    max_symbols = _DEFAULT_MAX_SYMBOLS
  if max_symbols < _MIN_SYMBOLS:
    raise errors.UserError(
      f'most symbols of a prompt ({text!r}) must be a number >= '
      f'{_MIN_SYMBOLS}, as in tokens:{task}/8'
    )
  return TokenTask(task, max_symbols=max_symbols, seed=seed)


_, _MID, _LAST = dm_env.StepType
_NO_REWARD, _ONE = np.float32(0.0), np.float32(1.0)
_TOKENS = tuple(_TOKEN_DTYPE.type(i) for i in range(VOCABULARY_SIZE))
_BOOLS = (np.bool_(False), np.bool_(True))
_TURNS = (np.int32(0), np.int32(1))
