"""A tool: a function with a name, a description, a schema and limits.

  @tool.tool(timeout_s=5.0, num_retries=2, max_concurrency=8)
  def search(query: str, limit: int = 3) -> str:
    '''Searches the library.

    Args:
      query: what to look for.
      limit: most results.
    '''

The schema comes from the type hints and the docstring. What the function
returns is what the policy reads: text as it is, anything else as JSON. To
refuse, it raises `taxonomy.ToolError`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import inspect
import re
import threading
import types as python_types
import typing
from typing import Any

from tunix_reverb import errors
from tunix_reverb.environments.tools import taxonomy

_JSON_TYPES = {
  str: 'string',
  int: 'integer',
  float: 'number',
  bool: 'boolean',
  list: 'array',
  dict: 'object',
}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
  'string': (str,),
  'integer': (int,),
  'number': (int, float),
  'boolean': (bool,),
  'array': (list,),
  'object': (dict,),
  'null': (type(None),),
}
_MAX_DESCRIBED = 1000
_DESCRIBED: dict[Any, tuple[str, dict[str, Any]]] = {}
_ARGUMENT_LINE = re.compile(r'\s+(\w+)(?: \([^)]*\))?: (.*)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What a tool may take.

  Attributes:
    timeout_s: seconds for one attempt, waiting for its turn included. None
      calls the function in the environment's own thread: only for what cannot
      wait.
    num_retries: further attempts after a transient error.
    back_off_s: seconds before the first further attempt; doubles each time.
    max_concurrency: calls at once, by all environments that share the tool: one
      made in a module is shared by all of the process. A call that overran its
      time counts until it returns. None: any number.
    max_result_characters: what is longer is cut, and says so.
  """

  timeout_s: float | None = 10.0
  num_retries: int = 0
  back_off_s: float = 0.5
  max_concurrency: int | None = None
  max_result_characters: int = 4000

  def __post_init__(self) -> None:
    if self.timeout_s is not None and not self.timeout_s > 0:
      raise errors.UserError(
        f'timeout_s ({self.timeout_s}) must be > 0 seconds'
      )
    for name, least in (
      ('num_retries', 0),
      ('back_off_s', 0),
      ('max_result_characters', 1),
    ):
      value = getattr(self, name)
      if not value >= least:
        raise errors.UserError(f'{name} ({value}) must be >= {least}')
    if self.max_concurrency is not None and self.max_concurrency < 1:
      raise errors.UserError(
        f'max_concurrency ({self.max_concurrency}) must be >= 1 or None'
      )


@dataclasses.dataclass(frozen=True)
class Tool:
  """See the module's docstring.

  Attributes:
    name: by which the policy calls it.
    description: for the policy.
    parameters: JSON schema of the arguments, an object.
    function: takes them by keyword.
    limits: of its calls.
    slots: shared by all that `dataclasses.replace` makes of it.
  """

  name: str
  description: str
  parameters: Mapping[str, Any]
  function: Callable[..., Any]
  limits: Limits = Limits()
  slots: threading.BoundedSemaphore | None = None

  def __post_init__(self) -> None:
    if self.slots is None and self.limits.max_concurrency is not None:
      slots = threading.BoundedSemaphore(self.limits.max_concurrency)
      object.__setattr__(self, 'slots', slots)

  @property
  def schema(self) -> dict[str, Any]:
    """As OpenAI's API has it."""
    return {
      'type': 'function',
      'function': {
        'name': self.name,
        'description': self.description,
        'parameters': self.parameters,
      },
    }

  def bind(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """The arguments of a call, checked against the schema.

    Args:
      arguments: by name, or the text of the first parameter (empty text leaves
        an optional one out).

    Raises:
      taxonomy.CallError: they do not fit; names the tool's own.
    """
    properties = self.parameters.get('properties', {})
    required = self.parameters.get('required', ())
    if isinstance(arguments, str):
      arguments = self._from_text(arguments, properties, required)
    for name in required:
      if name not in arguments:
        raise taxonomy.CallError(f'{self._usage()}: {name} is missing')
    is_open = self.parameters.get('additionalProperties', False)
    for name, value in arguments.items():
      if name in properties:
        self._check(name, value, properties[name])
      elif not is_open:
        raise taxonomy.CallError(f'{self._usage()}: there is no {name}')
    return dict(arguments)

  def _from_text(
    self, text: str, properties: Mapping[str, Any], required: Any
  ) -> dict[str, Any]:
    name = next(iter(properties), None)
    if name is None or (not text and name not in required):
      return {}
    kind = properties[name].get('type')
    convert = {'integer': int, 'number': float}.get(kind, str)
    try:
      return {name: convert(text)}
    except ValueError as e:
      raise taxonomy.CallError(
        f'{self._usage()}: {name} must be of type {kind}'
      ) from e

  def _check(self, name: str, value: Any, schema: Any) -> None:
    """Checks what a hint can say; deeper schemas are their tools' own."""
    if not isinstance(schema, Mapping):
      return
    kinds = schema.get('type')
    kinds = [kinds] if isinstance(kinds, str) else kinds or ()
    allowed = tuple(t for kind in kinds for t in _PYTHON_TYPES.get(kind, ()))
    is_wrong = allowed and (
      not isinstance(value, allowed)
      or (isinstance(value, bool) and bool not in allowed)
    )
    if is_wrong:
      raise taxonomy.CallError(
        f'{self._usage()}: {name} must be of type {" or ".join(kinds)}'
      )
    if 'enum' in schema and value not in schema['enum']:
      raise taxonomy.CallError(
        f'{self._usage()}: {name} must be one of {schema["enum"]}'
      )

  def _usage(self) -> str:
    return f'{self.name}({", ".join(self.parameters.get("properties", {}))})'


def tool(
  function: Callable[..., Any] | None = None,
  /,
  *,
  name: str | None = None,
  **limits: Any,
) -> Any:
  """Makes a `Tool` of a function; with or without arguments a decorator.

  Args:
    function: with a type hint for each parameter and a docstring.
    name: by which the policy calls it; the function's own by default.
    **limits: of `Limits`.

  Raises:
    errors.UserError: a hint or the docstring is missing.
  """
  if function is None:
    return lambda f: tool(f, name=name, **limits)
  description, parameters = _describe(function)
  return Tool(
    name=name or function.__name__,
    description=description,
    parameters=parameters,
    function=function,
    limits=Limits(**limits),
  )


def _describe(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
  """The description and the schema of the arguments.

  They are kept: a task may define its tool anew for every episode.
  """
  key = getattr(function, '__code__', function), function.__doc__
  described = _DESCRIBED.get(key)
  if described is None:
    if len(_DESCRIBED) >= _MAX_DESCRIBED:  # Docstrings made for each episode.
      _DESCRIBED.clear()
    described = _DESCRIBED[key] = _describe_anew(function)
  return described


def _describe_anew(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
  description, argument_texts = _read_docstring(function)
  try:
    hints = typing.get_type_hints(function)
  except NameError as e:
    raise errors.UserError(
      f'tool ({function.__name__}) must have type hints that its module knows: '
      f'{e}'
    ) from e
  properties, required = {}, []
  for parameter in inspect.signature(function).parameters.values():
    hint = hints.get(parameter.name)
    where = f'parameter {parameter.name} of tool {function.__name__}'
    properties[parameter.name] = _hint_schema(hint, where)
    if parameter.name in argument_texts:
      text = argument_texts[parameter.name]
      properties[parameter.name]['description'] = text
    if parameter.default is inspect.Parameter.empty:
      required.append(parameter.name)
  return description, {
    'type': 'object',
    'properties': properties,
    'required': required,
  }


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
  """The description, and what `Args:` says of each argument."""
  text = inspect.getdoc(function)
  if not text:
    raise errors.UserError(
      f'tool ({function.__name__}) must have a docstring: it is what the '
      'policy reads about it'
    )
  description, _, rest = text.partition('\nArgs:\n')
  description = re.split(r'\n(?:Returns|Raises):\n', description)[0]
  texts: dict[str, str] = {}
  last = None
  for line in rest.splitlines():
    if line and not line[0].isspace():
      break
    match = _ARGUMENT_LINE.match(line)
    if match:
      last = match.group(1)
      texts[last] = match.group(2).strip()
    elif last and line.strip():
      texts[last] += ' ' + line.strip()
  return ' '.join(description.split()), texts


def _hint_schema(hint: Any, where: str) -> dict[str, Any]:
  """The JSON schema of a type hint."""
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Literal:
    return {'type': _JSON_TYPES[type(arguments[0])], 'enum': list(arguments)}
  if origin in (typing.Union, python_types.UnionType):
    rest = [a for a in arguments if a is not type(None)]
    if len(rest) == 1:
      schema = _hint_schema(rest[0], where)
      return {**schema, 'type': [schema['type'], 'null']}
  plain = origin or hint
  if plain not in _JSON_TYPES:
    raise errors.UserError(
      f'{where} ({hint!r}) must have a type hint of '
      + ', '.join(t.__name__ for t in _JSON_TYPES)
      + ', typing.Literal, or one of them or None'
    )
  schema: dict[str, Any] = {'type': _JSON_TYPES[plain]}
  if plain is list and arguments:
    schema['items'] = _hint_schema(arguments[0], where)
  return schema
