"""Small problems for programs: a function, what it is for, and its inputs.

Each solution is complete by itself and uses nothing that has to be imported:
its source is what a perfect policy writes.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import inspect
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem.

  Attributes:
    solve: a right function; its docstring is the problem.
    draw: makes the arguments of one call, of types that `repr` writes.
  """

  solve: Callable[..., Any]
  draw: Callable[[np.random.Generator], tuple]

  @property
  def name(self) -> str:
    """Of the function."""
    return self.solve.__name__

  @property
  def signature(self) -> str:
    """Such as gcd(a, b)."""
    return f'{self.name}({", ".join(inspect.signature(self.solve).parameters)})'

  @property
  def text(self) -> str:
    """What the function is to do."""
    return inspect.getdoc(self.solve)

  @property
  def solution(self) -> str:
    """Its source."""
    return inspect.getsource(self.solve)


def _integer(generator: np.random.Generator, low: int, high: int) -> int:
  return int(generator.integers(low, high + 1))


def _integers(generator: np.random.Generator, low: int, high: int) -> list[int]:
  count = _integer(generator, 0, 8)
  return [_integer(generator, low, high) for _ in range(count)]


def _letters(generator: np.random.Generator, alphabet: str = 'abcde') -> str:
  count = _integer(generator, 0, 10)
  return ''.join(
    alphabet[i] for i in generator.integers(len(alphabet), size=count)
  )


def _sentence(generator: np.random.Generator) -> str:
  words = [_letters(generator) or 'a' for _ in range(_integer(generator, 1, 5))]
  return ' '.join(words)


def add(a, b):
  """Returns the sum of two integers."""
  return a + b


def largest(numbers):
  """Returns the largest of a list of integers, or None if it is empty."""
  return max(numbers) if numbers else None


def count_even(numbers):
  """Returns how many of a list of integers are even."""
  return len([number for number in numbers if number % 2 == 0])


def reverse_words(text):
  """Returns the words of a text in reverse order, with one space between."""
  return ' '.join(text.split()[::-1])


def count_vowels(text):
  """Returns how many letters of a text are a, e, i, o or u."""
  return len([letter for letter in text if letter in 'aeiou'])


def is_palindrome(text):
  """Returns whether a text reads the same backwards."""
  return text == text[::-1]


def fibonacci(n):
  """Returns the n-th Fibonacci number; the 0th is 0 and the 1st is 1."""
  a, b = 0, 1
  for _ in range(n):
    a, b = b, a + b
  return a


def greatest_common_divisor(a, b):
  """Returns the greatest common divisor of two positive integers."""
  while b:
    a, b = b, a % b
  return a


def primes_below(n):
  """Returns all primes smaller than n, in ascending order, as a list."""
  primes = []
  for number in range(2, n):
    if all(number % prime for prime in primes):
      primes.append(number)
  return primes


def without_duplicates(numbers):
  """Returns a list without the numbers that came before in it."""
  seen = []
  for number in numbers:
    if number not in seen:
      seen.append(number)
  return seen


def run_lengths(text):
  """Returns the runs of equal letters as a list of [letter, length]."""
  runs = []
  for letter in text:
    if runs and runs[-1][0] == letter:
      runs[-1][1] += 1
    else:
      runs.append([letter, 1])
  return runs


def digit_sum(n):
  """Returns the sum of the decimal digits of a number >= 0."""
  total = 0
  while n:
    total += n % 10
    n //= 10
  return total


PROBLEMS = (
  Problem(add, lambda g: (_integer(g, -99, 99), _integer(g, -99, 99))),
  Problem(largest, lambda g: (_integers(g, -50, 50),)),
  Problem(count_even, lambda g: (_integers(g, -50, 50),)),
  Problem(reverse_words, lambda g: (_sentence(g),)),
  Problem(count_vowels, lambda g: (_sentence(g),)),
  Problem(is_palindrome, lambda g: (_letters(g, 'ab')[:5],)),
  Problem(fibonacci, lambda g: (_integer(g, 0, 30),)),
  Problem(
    greatest_common_divisor,
    lambda g: (_integer(g, 1, 200), _integer(g, 1, 200)),
  ),
  Problem(primes_below, lambda g: (_integer(g, 0, 60),)),
  Problem(without_duplicates, lambda g: (_integers(g, 0, 5),)),
  Problem(run_lengths, lambda g: (_letters(g, 'ab'),)),
  Problem(digit_sum, lambda g: (_integer(g, 0, 99999),)),
)
