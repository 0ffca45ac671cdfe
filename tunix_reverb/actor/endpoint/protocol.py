"""OpenAI's chat completions: what requests ask, what responses say.

Only the part of the API that one sampled turn can answer; what it cannot is
refused, not overlooked. Sampling settings are the run's, not the client's:
temperature and the like are accepted and have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import time
from typing import Any
import uuid

from tunix_reverb.environments.tools import calls as calls_lib
from tunix_reverb.text import tokeniser as tokeniser_lib

_ROLES = ('system', 'developer', 'user', 'assistant', 'tool')
# Values of fields that we compute; others are refused.
_ONLY: Mapping[str, tuple[Any, ...]] = {
  'n': (1,),
  'top_logprobs': (0,),
  'stop': ([], ''),
  'response_format': ({'type': 'text'},),
  'tool_choice': ('auto',),
}


class RequestError(Exception):
  """What a client did wrong, or what cannot be served.

  Attributes:
    status: of HTTP.
    code: OpenAI's, for programs.
  """

  def __init__(
    self, message: str, *, status: int = 400, code: str = 'invalid_request'
  ):
    """Args: message: for people; status, code: see the class."""
    super().__init__(message)
    self.status = status
    self.code = code

  def body(self) -> dict[str, Any]:
    """JSON of the response."""
    kind = 'invalid_request_error' if self.status < 500 else 'server_error'
    return {
      'error': {
        'message': str(self),
        'type': kind,
        'code': self.code,
        'param': None,
      }
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A chat completion that was asked for.

  Attributes:
    messages: normal forms, see `normalise`.
    tools: as they were sent.
    max_tokens: of the answer; None leaves it to us.
    stream: whether the answer goes out as it is written.
    include_usage: whether the stream ends with counts of tokens.
    logprobs: whether the answer's log-probabilities are wanted.
  """

  messages: Sequence[tokeniser_lib.Message]
  tools: Sequence[tokeniser_lib.ToolSchema]
  max_tokens: int | None
  stream: bool
  include_usage: bool
  logprobs: bool


def parse(body: bytes) -> Request:
  """Reads the body of a request.

  Raises:
    RequestError: it is none, or asks what we do not have.
  """
  try:
    values = json.loads(body)
  except (ValueError, RecursionError) as e:
    raise RequestError(f'the body must be JSON: {e}') from e
  if not isinstance(values, dict):
    raise RequestError('the body must be a JSON object')
  for name, options in _ONLY.items():
    if values.get(name) is not None and values[name] not in options:
      raise RequestError(
        f'{name} ({json.dumps(values[name])[:80]}) must be '
        f'{json.dumps(options[0])}: one turn is sampled as the run samples'
      )
  messages = values.get('messages')
  if not isinstance(messages, list) or not messages:
    raise RequestError('messages must be a list of at least one')
  tools = values.get('tools') or []
  if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
    raise RequestError('tools must be a list of objects')
  most = values.get('max_completion_tokens') or values.get('max_tokens')
  if most is not None and (not isinstance(most, int) or most < 1):
    raise RequestError(f'max_tokens ({most!r}) must be a number >= 1')
  options = values.get('stream_options') or {}
  return Request(
    messages=[normalise(message) for message in messages],
    tools=tools,
    max_tokens=most,
    stream=bool(values.get('stream')),
    include_usage=bool(
      isinstance(options, dict) and options.get('include_usage')
    ),
    logprobs=bool(values.get('logprobs')),
  )


def normalise(message: Any) -> tokeniser_lib.Message:
  """The form in which equal messages are equal, whoever wrote them.

  Raises:
    RequestError: it is no message of text.
  """
  if not isinstance(message, dict) or message.get('role') not in _ROLES:
    raise RequestError(f'the role of a message must be one of {_ROLES}')
  role = message['role']
  normal: dict[str, Any] = {
    'role': 'system' if role == 'developer' else role,
    'content': _text(message.get('content')),
  }
  for name in ('name', 'tool_call_id'):
    if message.get(name) is not None:
      normal[name] = str(message[name])
  calls = message.get('tool_calls')
  if calls:
    try:
      normal['tool_calls'] = [_normal_call(call) for call in calls]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
      raise RequestError(f'tool_calls of a message are malformed: {e}') from e
  return normal


def _text(content: Any) -> str:
  if content is None:
    return ''
  if isinstance(content, list):
    is_text = lambda p: isinstance(p, dict) and p.get('type') == 'text'
    if not all(map(is_text, content)):
      raise RequestError('the parts of a content must be text')
    return ''.join(str(part.get('text', '')) for part in content)
  if not isinstance(content, str):
    raise RequestError('content must be text')
  return content


def _normal_call(call: Mapping[str, Any]) -> dict[str, Any]:
  """Arguments as an object, which templates expect."""
  arguments = call['function'].get('arguments') or '{}'
  if isinstance(arguments, str):
    arguments = json.loads(arguments)
  return {
    'id': str(call['id']),
    'type': 'function',
    'function': {'name': call['function']['name'], 'arguments': arguments},
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """One turn of the policy, as the API says it.

  Attributes:
    content: text outside tool calls.
    tool_calls: OpenAI's, arguments as JSON text.
    finish_reason: 'stop', 'length' or 'tool_calls'.
    num_prompt_tokens: that the policy had read.
    num_tokens: that it wrote.
  """

  content: str
  tool_calls: Sequence[Mapping[str, Any]]
  finish_reason: str
  num_prompt_tokens: int
  num_tokens: int

  def message(self) -> dict[str, Any]:
    """As `choices[0].message`."""
    message: dict[str, Any] = {
      'role': 'assistant',
      'content': self.content if self.content or not self.tool_calls else None,
      'refusal': None,
    }
    if self.tool_calls:
      message['tool_calls'] = list(self.tool_calls)
    return message

  def usage(self) -> dict[str, int]:
    """As `usage`."""
    return {
      'prompt_tokens': self.num_prompt_tokens,
      'completion_tokens': self.num_tokens,
      'total_tokens': self.num_prompt_tokens + self.num_tokens,
    }


def read_turn(
  text: str, marker: str | None, tools: Sequence[tokeniser_lib.ToolSchema]
) -> tuple[str, list[dict[str, Any]]]:
  """(content, tool calls) of a turn; malformed calls stay in the content.

  Args:
    text: of the turn.
    marker: of the chat format, see `calls.parse`.
    tools: of the request; without any there are no calls.
  """
  parsed = calls_lib.parse(text, marker) if tools else None
  if parsed is None or parsed.errors or not parsed.calls:
    return text, []
  calls = [
    {
      'id': f'call_{uuid.uuid4().hex[:24]}',
      'type': 'function',
      'function': _function(call, tools),
    }
    for call in parsed.calls
  ]
  return visible(text, marker, tools), calls


def visible(
  text: str, marker: str | None, tools: Sequence[tokeniser_lib.ToolSchema]
) -> str:
  """The part of a turn under way that is content for certain."""
  if not tools:
    return text
  if marker is not None:
    return ''  # Whether it is an argument is known at the end.
  opening = '<tool_call>'
  start = text.find(opening)
  if start >= 0:
    return text[:start].rstrip()
  for size in range(min(len(opening), len(text)), 0, -1):
    if opening.startswith(text[-size:]):
      text = text[:-size]
      break
  return text.rstrip()


def _function(
  call: calls_lib.Call, tools: Sequence[tokeniser_lib.ToolSchema]
) -> dict[str, str]:
  """Of a call with a marker: the first tool, its first parameter."""
  if not isinstance(call.arguments, str):
    return {'name': call.name or '', 'arguments': json.dumps(call.arguments)}
  function = tools[0].get('function', {})
  properties = function.get('parameters', {}).get('properties', {})
  arguments = {next(iter(properties)): call.arguments} if properties else {}
  return {
    'name': call.name or function.get('name', ''),
    'arguments': json.dumps(arguments),
  }


def log_probs(
  tokeniser: tokeniser_lib.Tokeniser,
  tokens: Sequence[int],
  values: Sequence[float],
) -> dict[str, Any]:
  """As `choices[0].logprobs`."""
  content = []
  for token, value in zip(tokens, values):
    text = tokeniser.decode([token])
    content.append(
      {
        'token': text,
        'logprob': float(value),
        'bytes': list(text.encode('utf-8', 'replace')),
        'top_logprobs': [],
      }
    )
  return {'content': content, 'refusal': None}


class Envelope:
  """What all parts of one response have in common."""

  def __init__(self, model: str):
    """Args: model: its name."""
    self._common = {
      'id': f'chatcmpl-{uuid.uuid4().hex}',
      'created': int(time.time()),
      'model': model,
    }

  def completion(
    self, answer: Answer, logprobs: Mapping[str, Any] | None
  ) -> dict[str, Any]:
    """The whole response."""
    choice = {
      'index': 0,
      'message': answer.message(),
      'logprobs': logprobs,
      'finish_reason': answer.finish_reason,
    }
    return {
      **self._common,
      'object': 'chat.completion',
      'choices': [choice],
      'usage': answer.usage(),
    }

  def chunk(
    self,
    delta: Mapping[str, Any],
    *,
    logprobs: Mapping[str, Any] | None = None,
    finish_reason: str | None = None,
  ) -> str:
    """One event of a stream."""
    choice = {
      'index': 0,
      'delta': delta,
      'logprobs': logprobs,
      'finish_reason': finish_reason,
    }
    return _event({**self._chunk(), 'choices': [choice]})

  def usage_chunk(self, answer: Answer) -> str:
    """The event of a stream that counts tokens."""
    return _event({**self._chunk(), 'choices': [], 'usage': answer.usage()})

  def _chunk(self) -> dict[str, Any]:
    return {**self._common, 'object': 'chat.completion.chunk'}


END_OF_STREAM = 'data: [DONE]\n\n'


def error_event(error: RequestError) -> str:
  """The event of a stream that has failed."""
  return _event(error.body())


def _event(values: Mapping[str, Any]) -> str:
  return f'data: {json.dumps(values)}\n\n'
