"""Arithmetic with a calculator.

  12+34. -> 12+34! -> =46. -> 46.

The first call that works earns `call_bonus`; the answer earns 1 if its last
number is the right one. Episodes of models from scratch have two turns of
calls at most, and then one for the answer.
"""

from __future__ import annotations

import re

import numpy as np

from tunix_reverb.environments.tasks import bonus
from tunix_reverb.environments.tools import calculator
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import task

_DEFAULT_DIGITS = 2
_NUMBER = re.compile(r'-?\d[\d,]*(?:\.\d+)?')
_INSTRUCTIONS = (
  'Work out what the user asks for with the calculator, then answer with the '
  'number and nothing else.'
)


class CalculatorTask(task.Task):
  """Sums and differences of two numbers of 1 to `digits` digits."""

  def __init__(self, *, digits: int, call_bonus: float):
    """Args: digits: of a number. call_bonus: reward of the first call."""
    self._digits = digits
    self._call_bonus = call_bonus
    # A sign or an operator between two numbers, and what ends a turn.
    most = 2 * digits + 3
    self.character_limits = task.Limits(
      max_turns=3,
      max_turn_tokens=most,
      max_observation_tokens=most,
      max_tokens=6 * most,
    )

  def start(self, generator: np.random.Generator) -> task.Instance:
    draw = lambda: int(
      generator.integers(10 ** generator.integers(1, self._digits + 1))
    )
    left, right = draw(), draw()
    operator = '+-'[generator.integers(2)]
    question = f'{left}{operator}{right}'
    answer = left + right if operator == '+' else left - right

    def oracle(episode: task.Transcript) -> calls.Call | str:
      if not episode.turns:
        return calls.Call('calculator', {'expression': question})
      return episode.calls[0].result

    return task.Instance(
      messages=[
        {'role': 'system', 'content': _INSTRUCTIONS},
        {'role': 'user', 'content': question},
      ],
      tools=[calculator.calculator],
      score=lambda episode: float(last_number(episode.answer) == answer),
      turn_reward=bonus.of_first_call(self._call_bonus),
      oracle=oracle,
    )


def last_number(text: str) -> float | None:
  """The last number in `text`, if there is one."""
  numbers = _NUMBER.findall(text)
  return float(numbers[-1].replace(',', '')) if numbers else None


def make(name: str, argument: str) -> CalculatorTask:
  """Makes calculator, or calculator/<digits>[/<call bonus>].

  Raises:
    errors.UserError: the argument is not of that form.
  """
  digits, call_bonus = bonus.parse(
    name,
    argument,
    what='the most digits of a number',
    default=_DEFAULT_DIGITS,
  )
  return CalculatorTask(digits=digits, call_bonus=call_bonus)
