"""reasoning_gym's datasets of problems that generate and score themselves.

  reasoning_gym:chain_sum
  reasoning_gym:chain_sum/min_terms=2/max_terms=2    settings of the dataset

The policy has one turn, and may think aloud: what counts is between
<answer> and </answer>, or all of it where there are no such tags. Some
datasets evaluate an answer as Python; what is no arithmetic never gets there.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import json
import re
import sys
from typing import Any

import numpy as np

from tunix_reverb import errors
from tunix_reverb.environments.tools import task

_MAX_ANSWER_CHARACTERS = 10_000
_MAX_EXPONENT = 100
_EVALUATORS = ('eval(', 'parse_expr(', 'sympify(')
_FUNCTIONS = frozenset(
  'sin cos tan asin acos atan sinh cosh tanh exp log ln sqrt Rational'.split()
)
_HARMLESS = (
  ast.Expression,
  ast.BinOp,
  ast.UnaryOp,
  ast.operator,
  ast.unaryop,
  ast.List,
  ast.Tuple,
  ast.Load,
)


class ReasoningTask(task.Task):
  """Problems of one dataset; see the module's docstring."""

  def __init__(self, dataset: str, settings: dict[str, Any]):
    """Args: dataset: its name. settings: of its own.

    Raises:
      errors.UserError: there is no such dataset or setting.
    """
    import reasoning_gym
    from reasoning_gym import factory
    from reasoning_gym import utils

    known = sorted(factory.DATASETS)
    if dataset not in known:
      close = difflib.get_close_matches(dataset, known, n=3) or known[:5]
      raise errors.UserError(
        f'reasoning_gym dataset ({dataset!r}) must be one of the {len(known)} '
        f'there are, such as {", ".join(close)}'
      )
    # One problem each: some datasets make all of theirs at once.
    self._make = functools.partial(
      reasoning_gym.create_dataset, dataset, size=1, **settings
    )
    try:
      example = self._make(seed=0)
    except (AssertionError, TypeError, ValueError) as e:
      raise errors.UserError(
        f'settings ({settings}) of reasoning_gym:{dataset} must be its own: {e}'
      ) from e
    self._instructions = utils.SYSTEM_PROMPTS['default']
    self._extract = utils.extract_answer
    self._evaluates = _evaluates(example)

  limits = task.Limits(max_turns=1)

  def start(self, generator: np.random.Generator) -> task.Instance:
    dataset = self._make(seed=int(generator.integers(2**31 - 1)))
    entry = dataset[0]

    def score(episode: task.Transcript) -> float:
      text = episode.turns[-1].text
      answer = self._extract(text)
      return self._score(
        text.strip() if answer is None else answer, entry, dataset
      )

    # Some problems have many solutions, and come with none.
    solution = entry['answer']
    return task.Instance(
      messages=[
        {'role': 'system', 'content': self._instructions},
        {'role': 'user', 'content': entry['question']},
      ],
      score=score,
      next_messages=lambda episode: None,
      oracle=(lambda _: f'<answer>{solution}</answer>') if solution else None,
    )

  def _score(self, answer: str, entry: dict[str, Any], dataset: Any) -> float:
    if len(answer) > _MAX_ANSWER_CHARACTERS:
      return 0.0
    if self._evaluates and not is_harmless(answer):
      return float(answer == entry['answer'])
    try:
      return float(dataset.score_answer(answer, entry))
    except Exception:  # pylint: disable=broad-except
      # Scorers parse what the policy wrote; many raise where they cannot.
      return 0.0


def _evaluates(dataset: Any) -> bool:
  """Whether the module of `dataset` evaluates text as Python or sympy."""
  source = inspect.getsource(sys.modules[type(dataset).__module__])
  # One module has a parser of its own, of that name.
  words = [w for w in _EVALUATORS if f'def {w}' not in source]
  return any(re.search(rf'\b{re.escape(w)}', source) for w in words)


def is_harmless(answer: str) -> bool:
  """Whether `answer` may be evaluated: numbers, names and arithmetic."""
  try:
    tree = ast.parse(answer.strip(), mode='eval')
  except (SyntaxError, SyntaxWarning, ValueError, MemoryError, RecursionError):
    return False
  return all(_is_harmless_node(node) for node in ast.walk(tree))


def _is_harmless_node(node: ast.AST) -> bool:
  if isinstance(node, ast.Call):
    return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
  if isinstance(node, ast.Name):
    return node.id in _FUNCTIONS or (
      len(node.id) <= 2 and not node.id.startswith('_')
    )
  if isinstance(node, ast.Constant):
    return isinstance(node.value, (int, float, str)) and not (
      isinstance(node.value, str) and len(node.value) > 1
    )
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
    exponent = node.right
    return isinstance(exponent, ast.Constant) and (
      isinstance(exponent.value, (int, float))
      and exponent.value <= _MAX_EXPONENT
    )
  return isinstance(node, _HARMLESS)


def make(argument: str) -> ReasoningTask:
  """Makes <dataset>[/<setting>=<value>]...

  Raises:
    errors.UserError: there is no such dataset or setting.
  """
  dataset, *pairs = argument.split('/')
  settings = {}
  for pair in pairs:
    name, separator, text = pair.partition('=')
    if not separator or not name.isidentifier():
      raise errors.UserError(
        f'setting ({pair!r}) of reasoning_gym:{dataset} must be a name and a '
        'value, as in reasoning_gym:chain_sum/max_terms=2'
      )
    try:
      settings[name] = json.loads(text)
    except ValueError:
      settings[name] = text
  return ReasoningTask(dataset, settings)
