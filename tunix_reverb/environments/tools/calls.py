"""Tool calls in what a policy wrote; nothing it can write raises.

Two ways to write one:
  JSON    text <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>,
          as often as one likes (the form of Hermes and Qwen)
  marker  1+2!: what stands before the marker at the end of the turn is
          the argument of the only tool (models from scratch)
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import re
from typing import Any

_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
_JSON_CALL = re.compile(
  f'{re.escape(_OPEN)}(.*?)(?:{re.escape(_CLOSE)}|\\Z)', re.DOTALL
)
_FENCE = re.compile(r'```[ \t]*(?:python|py)?[ \t]*\n(.*?)```', re.DOTALL)
_MAX_QUOTED = 60
# Of brackets; what walks the arguments later recurses.
_MAX_DEPTH = 50


@dataclasses.dataclass(frozen=True)
class Call:
  """One call as the policy wrote it.

  Attributes:
    name: of the tool; None means the only one.
    arguments: by name; a string is the value of the tool's first parameter.
  """

  name: str | None
  arguments: Mapping[str, Any] | str


@dataclasses.dataclass(frozen=True)
class Parsed:
  """What a turn says.

  Attributes:
    content: its text without the calls, stripped.
    calls: in order.
    errors: one line for each call that could not be read, for the policy.
  """

  content: str
  calls: tuple[Call, ...] = ()
  errors: tuple[str, ...] = ()


def parse(text: str, marker: str | None = None) -> Parsed:
  """Finds the calls in `text`.

  Args:
    text: of one turn.
    marker: of the form with a marker; None for JSON.
  """
  if marker is not None:
    argument = text.removesuffix(marker)
    calls = () if argument == text else (Call(None, argument),)
    return Parsed('' if calls else text, calls)
  calls, errors = [], []
  for match in _JSON_CALL.finditer(text):
    if not match.group(0).endswith(_CLOSE):
      errors.append(f'a tool call must end with {_CLOSE}')
      continue
    try:
      calls.append(_from_json(match.group(1)))
    except ValueError as e:
      errors.append(str(e))
  content = _JSON_CALL.sub('', text).strip()
  return Parsed(content, tuple(calls), tuple(errors))


def _from_json(text: str) -> Call:
  """Reads what stands between the tags; raises ValueError for the policy."""
  if _depth(text) > _MAX_DEPTH:
    raise ValueError(
      f'tool call ({_quote(text)}) must be JSON of at most {_MAX_DEPTH} levels'
    )
  try:
    value = json.loads(text, parse_constant=_refuse_constant)
  except json.JSONDecodeError as e:
    raise ValueError(
      f'tool call ({_quote(text)}) must be JSON: {e.msg} at character {e.pos}'
    ) from e
  except ValueError as e:
    raise ValueError(f'tool call ({_quote(text)}) must be JSON: {e}') from e
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    raise ValueError(
      f'tool call ({_quote(text)}) must be an object with a "name" and '
      '"arguments"'
    )
  arguments = value.get('arguments', {})
  if not isinstance(arguments, dict):
    raise ValueError(
      f'arguments of {_quote(value["name"])} must be an object, not '
      f'{_quote(json.dumps(arguments))}'
    )
  return Call(value['name'], arguments)


def _depth(text: str) -> int:
  """Most brackets open at once; those in strings count, too."""
  depth = deepest = 0
  for bracket in re.findall(r'[\[\]{}]', text):
    depth += 1 if bracket in '[{' else -1
    deepest = max(deepest, depth)
  return deepest


def _refuse_constant(name: str) -> float:
  raise ValueError(f'{name} is no JSON number')


def _quote(text: str) -> str:
  text = ' '.join(text.split())
  return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + '...'


def render(call: Call, marker: str | None = None) -> str:
  """The text that `parse` reads as `call`, for scripted policies.

  Args:
    call: to write.
    marker: as of `parse`; then only the value of the first argument is kept.
  """
  if marker is not None:
    arguments = call.arguments
    if not isinstance(arguments, str):
      arguments = str(next(iter(arguments.values()), ''))
    return arguments + marker
  value = {'name': call.name, 'arguments': call.arguments}
  return f'{_OPEN}{json.dumps(value)}{_CLOSE}'


def python_block(text: str) -> str | None:
  """The last fenced block of Python in `text`, if there is one."""
  blocks = _FENCE.findall(text)
  return blocks[-1] if blocks else None
