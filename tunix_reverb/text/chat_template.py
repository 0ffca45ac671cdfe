"""Chat templates: the jinja program of a checkpoint that writes conversations.

Rendered as `transformers` does (its `render_jinja_template`), in a sandbox: a
template comes with a checkpoint, from whoever made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import datetime
import json
from typing import Any

from tunix_reverb import errors
from tunix_reverb.text import tokeniser as tokeniser_lib

_TOOLS_INTRODUCTION = """You may call one or more functions to assist with the \
user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments \
within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
# To see whether a template shows tools at all.
_PROBE: Sequence[Mapping[str, Any]] = ({'role': 'user', 'content': 'Hello'},)
_PROBE_TOOLS: Sequence[Mapping[str, Any]] = (
  {
    'type': 'function',
    'function': {
      'name': 'probe',
      'description': 'Nothing.',
      'parameters': {'type': 'object', 'properties': {}},
    },
  },
)


class ChatTemplate:
  """One template, ready to render."""

  def __init__(self, text: str, *, special: Mapping[str, str], where: str):
    """Compiles it.

    Args:
      text: of the template.
      special: what it may name besides the messages, such as `bos_token`.
      where: it comes from; named in errors.

    Raises:
      errors.UserError: it is not a valid template.
    """
    import jinja2

    self._special = dict(special)
    self._where = where
    self._errors = jinja2.TemplateError
    try:
      self._template = _environment().from_string(text)
    except jinja2.TemplateError as e:
      raise self._error(f'is not valid: {e}') from e
    self._shows_tools = self._render(_PROBE, _PROBE_TOOLS) != self._render(
      _PROBE, ()
    )

  def render(
    self,
    messages: Sequence[tokeniser_lib.Message],
    tools: Sequence[tokeniser_lib.ToolSchema] = (),
  ) -> str:
    """The text up to where the assistant writes.

    Tools that the template would leave out are told in the system's message, in
    the words that Qwen's and Hermes' templates have for them.

    Raises:
      errors.UserError: the template refuses these messages.
    """
    if tools and not self._shows_tools:
      messages, tools = _with_tools_told(messages, tools), ()
    return self._render(messages, tools)

  def _render(
    self,
    messages: Sequence[tokeniser_lib.Message],
    tools: Sequence[tokeniser_lib.ToolSchema],
  ) -> str:
    try:
      return self._template.render(
        messages=[dict(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        documents=None,
        add_generation_prompt=True,
        **self._special,
      )
    except (self._errors, TypeError, ValueError) as e:
      roles = ', '.join(str(message.get('role')) for message in messages)
      raise self._error(f'refuses messages of {roles}: {e}') from e

  def _error(self, problem: str) -> errors.UserError:
    return errors.UserError(f'chat template of {self._where} {problem}')


def _with_tools_told(
  messages: Sequence[tokeniser_lib.Message],
  tools: Sequence[tokeniser_lib.ToolSchema],
) -> list[tokeniser_lib.Message]:
  schemas = '\n'.join(json.dumps(dict(tool)) for tool in tools)
  told = _TOOLS_INTRODUCTION.format(schemas=schemas)
  if messages and messages[0]['role'] == 'system':
    system = {**messages[0], 'content': f'{messages[0]["content"]}\n\n{told}'}
    return [system, *messages[1:]]
  return [{'role': 'system', 'content': told}, *messages]


def _environment() -> Any:
  import jinja2
  from jinja2 import ext
  from jinja2 import sandbox

  class GenerationTag(ext.Extension):
    """`{% generation %}`: what assistants write; nothing to us."""

    tags = {'generation'}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
      next(parser.stream)
      return parser.parse_statements(('name:endgeneration',), drop_needle=True)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[GenerationTag, ext.loopcontrols],
  )

  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  environment.filters['tojson'] = lambda value, indent=None: json.dumps(
    value, ensure_ascii=False, indent=indent
  )
  environment.globals['raise_exception'] = raise_exception
  environment.globals['strftime_now'] = lambda form: (
    datetime.datetime.now().strftime(form)
  )
  return environment
