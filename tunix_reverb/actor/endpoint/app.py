"""The endpoint's HTTP: chat completions, rewards, and what clients look up.

POST /v1/chat/completions          header X-Episode-Id: the agent's name of
                                   the episode
POST /v1/episodes/{id}/reward      {"reward": 1.0, "truncated": false}, ends
                                   the episode
GET  /v1/models, GET /health
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import AsyncIterator
from collections.abc import Awaitable
from collections.abc import Callable
import contextlib
import json
import math
from typing import Any

from starlette import applications
from starlette import requests
from starlette import responses
from starlette import routing

from tunix_reverb.actor.endpoint import conversations as conversations_lib
from tunix_reverb.actor.endpoint import protocol
from tunix_reverb.text import tokeniser as tokeniser_lib

EPISODE_HEADER = 'X-Episode-Id'
_MAX_BODY_BYTES = 8 * 2**20
_EXPIRE_PERIOD_S = 1.0


class Endpoint:
  """The handlers of all routes."""

  def __init__(
    self,
    conversations: conversations_lib.Conversations,
    chat_format: tokeniser_lib.ChatFormat,
    *,
    model: str,
  ):
    """Args: conversations, chat_format: see there; model: its name."""
    self._conversations = conversations
    self._format = chat_format
    self._model = model
    self._loop: asyncio.AbstractEventLoop | None = None

  def make_app(self) -> applications.Starlette:
    """The ASGI application."""
    route = lambda path, handler, method: routing.Route(
      path, _answering_errors(handler), methods=[method]
    )
    return applications.Starlette(
      routes=[
        route('/v1/chat/completions', self._chat, 'POST'),
        route('/v1/episodes/{name}/reward', self._reward, 'POST'),
        route('/v1/models', self._models, 'GET'),
        route('/health', self._health, 'GET'),
      ],
      lifespan=self._lifespan,
    )

  def close(self) -> None:
    """Answers whoever waits; from any thread, before the server is closed."""
    if self._loop is not None:
      self._loop.call_soon_threadsafe(self._conversations.close)

  @contextlib.asynccontextmanager
  async def _lifespan(self, app: applications.Starlette) -> AsyncIterator[None]:
    del app
    self._loop = asyncio.get_running_loop()
    task = asyncio.create_task(self._expire())
    try:
      yield
    finally:
      task.cancel()

  async def _expire(self) -> None:
    while True:
      await asyncio.sleep(_EXPIRE_PERIOD_S)
      self._conversations.expire()

  async def _chat(self, request: requests.Request) -> responses.Response:
    asked = protocol.parse(await _body(request))
    episode = self._conversations.episode(
      request.headers.get(EPISODE_HEADER), create=True
    )
    if asked.stream:
      # The first event is made before the status is sent: most errors come
      # before it.
      events = self._stream(episode, asked)
      first = await anext(events)
      return responses.StreamingResponse(
        _chain(first, events), media_type='text/event-stream'
      )
    async with episode.lock:
      turn = await self._conversations.ask(episode, asked)
      tokens: list[int] = []
      log_probs: list[float] = []
      async with contextlib.aclosing(turn.written) as parts:
        async for part in parts:
          tokens += part.tokens
          log_probs += part.log_probs
      answer = self._answer(turn, tokens, asked)
      self._conversations.answered(episode, answer.message(), tokens)
    values = None
    if asked.logprobs:
      values = protocol.log_probs(self._format.tokeniser, tokens, log_probs)
    return responses.JSONResponse(
      protocol.Envelope(self._model).completion(answer, values)
    )

  async def _stream(
    self, episode: conversations_lib.Episode, asked: protocol.Request
  ) -> AsyncGenerator[str, None]:
    """The events of an answer that goes out as it is written."""
    envelope = protocol.Envelope(self._model)
    async with episode.lock:
      turn = await self._conversations.ask(episode, asked)
      yield envelope.chunk({'role': 'assistant', 'content': ''})
      tokens: list[int] = []
      said = ''
      async with contextlib.aclosing(turn.written) as parts:
        async for part in parts:
          tokens += part.tokens
          text = self._visible(tokens, asked)
          values = None
          if asked.logprobs:
            values = protocol.log_probs(self._format.tokeniser, *part[:2])
          # A character whose bytes are not all there yet is not said yet.
          if not part.is_last and (
            text.endswith('\ufffd') or not text.startswith(said)
          ):
            text = said
          if not part.is_last and (len(text) > len(said) or values):
            yield envelope.chunk(
              {'content': text[len(said) :]}, logprobs=values
            )
            said = text
      answer = self._answer(turn, tokens, asked)
      self._conversations.answered(episode, answer.message(), tokens)
    delta: dict[str, Any] = {}
    if len(answer.content) > len(said):
      delta['content'] = answer.content[len(said) :]
    if answer.tool_calls:
      delta['tool_calls'] = [
        {'index': i, **call} for i, call in enumerate(answer.tool_calls)
      ]
    yield envelope.chunk(delta, logprobs=values)
    yield envelope.chunk({}, finish_reason=answer.finish_reason)
    if asked.include_usage:
      yield envelope.usage_chunk(answer)
    yield protocol.END_OF_STREAM

  def _visible(self, tokens: list[int], asked: protocol.Request) -> str:
    return protocol.visible(
      self._format.text(tokens), self._format.call_marker, asked.tools
    )

  def _answer(
    self,
    turn: conversations_lib.Turn,
    tokens: list[int],
    asked: protocol.Request,
  ) -> protocol.Answer:
    content, calls = protocol.read_turn(
      self._format.text(tokens), self._format.call_marker, asked.tools
    )
    reason = 'tool_calls' if calls else 'stop'
    if tokens[-1] not in self._format.stop_tokens:
      reason = 'length'
    return protocol.Answer(
      content=content,
      tool_calls=calls,
      finish_reason=reason,
      num_prompt_tokens=turn.num_prompt_tokens,
      num_tokens=len(tokens),
    )

  async def _reward(self, request: requests.Request) -> responses.Response:
    episode = self._conversations.episode(
      request.path_params['name'], create=False
    )
    values = _json_object(await _body(request))
    reward = values.get('reward')
    is_number = isinstance(reward, (int, float)) and not isinstance(
      reward, bool
    )
    if not is_number or not math.isfinite(reward):
      raise protocol.RequestError(f'reward ({reward!r}) must be a number')
    async with episode.lock:
      self._conversations.end(
        episode,
        reward=float(reward),
        truncated=bool(values.get('truncated', False)),
      )
    return responses.JSONResponse(
      {
        'episode_id': episode.name,
        'segments': episode.segments,
        'turns': episode.num_turns,
        'tokens': episode.num_tokens,
      }
    )

  async def _models(self, request: requests.Request) -> responses.Response:
    del request
    model = {'id': self._model, 'object': 'model', 'owned_by': 'tunix_reverb'}
    return responses.JSONResponse({'object': 'list', 'data': [model]})

  async def _health(self, request: requests.Request) -> responses.Response:
    del request
    return responses.JSONResponse(vars(self._conversations.counts))


Handler = Callable[[requests.Request], Awaitable[responses.Response]]


def _answering_errors(handler: Handler) -> Handler:
  """Turns a `RequestError` into a response."""

  async def wrapped(request: requests.Request) -> responses.Response:
    try:
      return await handler(request)
    except protocol.RequestError as e:
      return responses.JSONResponse(e.body(), status_code=e.status)

  return wrapped


async def _body(request: requests.Request) -> bytes:
  """The body, as far as it may be long.

  It must be declared as JSON: a page in a browser could send anything else to
  a port of its own host without asking.
  """
  kind = request.headers.get('content-type', '')
  if kind.partition(';')[0].strip().lower() != 'application/json':
    raise protocol.RequestError(
      f'the content type ({kind!r}) must be application/json', status=415
    )
  body = bytearray()
  async for part in request.stream():
    body += part
    if len(body) > _MAX_BODY_BYTES:
      raise protocol.RequestError(
        f'the body must be at most {_MAX_BODY_BYTES} bytes',
        status=413,
        code='too_large',
      )
  return bytes(body)


def _json_object(body: bytes) -> dict[str, Any]:
  try:
    values = json.loads(body)
  except (ValueError, RecursionError) as e:
    raise protocol.RequestError(f'the body must be JSON: {e}') from e
  if not isinstance(values, dict):
    raise protocol.RequestError('the body must be a JSON object')
  return values


async def _chain(
  first: str, events: AsyncGenerator[str, None]
) -> AsyncGenerator[str, None]:
  """All events; one that tells of a failure where it comes to that."""
  try:
    async with contextlib.aclosing(events):
      yield first
      async for event in events:
        yield event
  except protocol.RequestError as e:
    yield protocol.error_event(e)
