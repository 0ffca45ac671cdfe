"""Write a function; it is run on inputs, and what it returns is compared.

  code       one answer
  code/3     up to three; after a wrong one the policy reads what went wrong

The answer is a block of Python between ``` fences. Before it, the policy may
try programs with the tool `python`. The score is the fraction of inputs for
which the last answer's function was right. The right results never enter the
sandbox: a program can only get them by working them out.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
import dataclasses
from typing import Any
import uuid

import numpy as np

from tunix_reverb import errors
from tunix_reverb.environments.tasks import code_problems
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import python_tool
from tunix_reverb.environments.tools import sandbox as sandbox_lib
from tunix_reverb.environments.tools import task
from tunix_reverb.text import tokeniser

_NUM_EXAMPLES = 2
_NUM_CASES = 8
_MAX_QUOTED = 500
_TEXT = """Write a Python function {signature}.
{text}
For example:
{examples}
Answer with the function in one block between ```python and ```."""
# Names that no solution needs.
_HARNESS = """
{solution}

_results = []
for _arguments in {inputs!r}:
  try:
    _results.append((True, {name}(*_arguments)))
  except Exception as _error:
    _results.append((False, type(_error).__name__ + ': ' + str(_error)))
print()
print({marker!r} + repr(_results))
"""


@dataclasses.dataclass
class Verdict:
  """On one answer.

  Attributes:
    num_right: of the cases.
    text: what the policy reads.
  """

  num_right: int
  text: str


class CodeTask(task.Task):
  """See the module's docstring."""

  limits = task.Limits(max_turns=12, max_turn_tokens=512)

  def __init__(self, *, max_answers: int, sandbox: sandbox_lib.Sandbox):
    """Args: max_answers: of an episode. sandbox: closed with the task."""
    self._max_answers = max_answers
    self._sandbox = sandbox
    self._python = python_tool.make(sandbox)

  def start(self, generator: np.random.Generator) -> task.Instance:
    problems = code_problems.PROBLEMS
    problem = problems[generator.integers(len(problems))]
    inputs = [problem.draw(generator) for _ in range(_NUM_CASES)]
    cases = [(i, problem.solve(*i)) for i in inputs]
    verdicts: list[Verdict] = []

    def next_messages(
      episode: task.Transcript,
    ) -> Sequence[tokeniser.Message] | None:
      if task.until_answer(episode) is not None:
        return ()
      verdicts.append(self._judge(problem, cases, episode.turns[-1].text))
      is_over = len(verdicts) == self._max_answers
      if is_over or verdicts[-1].num_right == _NUM_CASES:
        return None
      return [{'role': 'user', 'content': verdicts[-1].text}]

    return task.Instance(
      messages=[{'role': 'user', 'content': _ask(problem, cases)}],
      tools=[self._python],
      score=lambda episode: verdicts[-1].num_right / _NUM_CASES,
      next_messages=next_messages,
      oracle=lambda episode: f'```python\n{problem.solution}```',
    )

  def _judge(
    self, problem: code_problems.Problem, cases: list[tuple], text: str
  ) -> Verdict:
    """Runs an answer on all inputs."""
    solution = calls.python_block(text)
    if solution is None:
      return Verdict(0, 'There is no block between ```python and ```.')
    marker = uuid.uuid4().hex
    result = self._sandbox.run(
      _HARNESS.format(
        solution=solution,
        inputs=[arguments for arguments, _ in cases],
        name=problem.name,
        marker=marker,
      )
    )
    returned = _read(result.output, marker)
    if result.stopped is not None or returned is None:
      reason = python_tool.REASONS.get(result.stopped, 'it did not run')
      return Verdict(0, f'{reason}:\n{result.output[-_MAX_QUOTED:]}')
    right = [
      succeeded and _equals(value, case[1])
      for (succeeded, value), case in zip(returned, cases)
    ]
    return Verdict(sum(right), _explain(problem, cases, returned, right))

  def close(self) -> None:
    self._sandbox.close()


def _ask(problem: code_problems.Problem, cases: list[tuple]) -> str:
  return _TEXT.format(
    signature=problem.signature,
    text=problem.text,
    examples='\n'.join(
      f'{_call(problem, arguments)} == {result!r}'
      for arguments, result in cases[:_NUM_EXAMPLES]
    ),
  )


def _call(problem: code_problems.Problem, arguments: tuple) -> str:
  return f'{problem.name}({", ".join(map(repr, arguments))})'


def _read(output: str, marker: str) -> list[tuple[bool, Any]] | None:
  """What the harness printed last; None if it did not come so far."""
  text = output.rpartition(marker)[2] if marker in output else ''
  try:
    returned = ast.literal_eval(text.strip())
  except (ValueError, SyntaxError, MemoryError, RecursionError):
    return None
  is_right_form = isinstance(returned, list) and all(
    isinstance(one, tuple) and len(one) == 2 for one in returned
  )
  return returned if is_right_form and len(returned) == _NUM_CASES else None


def _equals(value: Any, expected: Any) -> bool:
  """Whether they are equal, and of the same type: 1 is not True."""
  return type(value) is type(expected) and value == expected


def _explain(
  problem: code_problems.Problem,
  cases: list[tuple],
  returned: list[tuple[bool, Any]],
  right: list[bool],
) -> str:
  """Names the first of the examples that is wrong; keeps the others secret."""
  lines = [f'{sum(right)} of {len(right)} inputs are right.']
  for (arguments, expected), (succeeded, value), is_right in zip(
    cases[:_NUM_EXAMPLES], returned, right
  ):
    if not is_right:
      got = repr(value) if succeeded else str(value)
      lines.append(
        f'{_call(problem, arguments)} should be {expected!r}, not '
        f'{got[:_MAX_QUOTED]}'
      )
      break
  return '\n'.join(lines)


def make(name: str, argument: str) -> CodeTask:
  """Makes code, or code/<most answers>.

  Raises:
    errors.UserError: the argument is no number >= 1, or there is no sandbox.
  """
  max_answers = (
    int(argument or 1) if argument.isdecimal() or not argument else 0
  )
  if max_answers < 1:
    raise errors.UserError(
      f'most answers ({argument!r}) must be a number >= 1, as in tool:{name}/3'
    )
  return CodeTask(max_answers=max_answers, sandbox=sandbox_lib.find())
