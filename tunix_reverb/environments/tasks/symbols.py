"""Copy and reverse: one turn, no tools; whether a model learns at all.

  reverse:  475. -> 574.

The reward is the fraction of the answer's positions that are right, its end
among them. A uniformly random policy scores about 1 / 16, a perfect one 1.
"""

from __future__ import annotations

import numpy as np

from tunix_reverb import errors
from tunix_reverb.environments.tools import task

SYMBOLS = '01234567'
_MIN_SYMBOLS = 2
_DEFAULT_MAX_SYMBOLS = 4
_INSTRUCTIONS = {
  'copy': 'Repeat what the user says. Write nothing else.',
  'reverse': 'Write what the user says backwards. Write nothing else.',
}


class SymbolTask(task.Task):
  """Prompts of 2 to `max_symbols` symbols, each length as often."""

  def __init__(self, name: str, *, max_symbols: int):
    """Args: name: 'copy' or 'reverse'. max_symbols: of a prompt."""
    self._name = name
    self._max_symbols = max_symbols
    self.character_limits = task.Limits(
      max_turns=1,
      max_turn_tokens=max_symbols + 1,
      max_observation_tokens=max_symbols + 1,
      max_tokens=2 * max_symbols + 2,
    )

  def start(self, generator: np.random.Generator) -> task.Instance:
    count = int(generator.integers(_MIN_SYMBOLS, self._max_symbols + 1))
    prompt = draw_symbols(generator, count)
    answer = prompt[::-1] if self._name == 'reverse' else prompt
    return task.Instance(
      messages=[
        {'role': 'system', 'content': _INSTRUCTIONS[self._name]},
        {'role': 'user', 'content': prompt},
      ],
      score=lambda episode: _score(episode.turns[-1].text.strip(), answer),
      next_messages=lambda episode: None,
      oracle=lambda episode: answer,
    )


def draw_symbols(generator: np.random.Generator, count: int) -> str:
  """`count` uniform symbols."""
  return ''.join(
    SYMBOLS[i] for i in generator.integers(len(SYMBOLS), size=count)
  )


def _score(text: str, answer: str) -> float:
  right = sum(a == b for a, b in zip(text, answer))
  return (right + (len(text) == len(answer))) / (len(answer) + 1)


def make(name: str, argument: str) -> SymbolTask:
  """Makes `name` of prompts up to `argument` symbols ('' for 4).

  Raises:
    errors.UserError: the argument is no such number.
  """
  max_symbols = int(argument) if argument.isdecimal() else 0
  if not argument:
    max_symbols = _DEFAULT_MAX_SYMBOLS
  if max_symbols < _MIN_SYMBOLS:
    raise errors.UserError(
      f'most symbols of a prompt ({argument!r}) must be a number >= '
      f'{_MIN_SYMBOLS}, as in tool:{name}/8'
    )
  return SymbolTask(name, max_symbols=max_symbols)
