"""The tools of any MCP server, over stdio or streamable HTTP.

  class Files(task.Task):
    def __init__(self):
      self._server = mcp_tools.McpServer(['file-server', '--read-only'])

    def start(self, generator):
      return task.Instance(tools=self._server.tools(), ...)

    def close(self):
      self._server.close()

The protocol runs on an event loop in a thread of its own; every wait for it
has a deadline. A server that this process starts ends with `close`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
import concurrent.futures
import threading
from typing import Any

from absl import logging

from tunix_reverb import errors
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool as tool_lib

_CLOSE_TIMEOUT_S = 10.0
# Beyond a call's own deadline, for the loop to answer at all.
_MARGIN_S = 1.0


class McpServer:
  """One server; see the module's docstring."""

  def __init__(
    self,
    target: str | Sequence[str],
    *,
    start_timeout_s: float = 30.0,
    limits: tool_lib.Limits | None = None,
  ):
    """Says which; nothing starts before `tools` is called.

    Args:
      target: the URL of a server that runs, or the command (program and
        arguments) of one to start, which speaks on its stdin and stdout.
      start_timeout_s: seconds until it must have listed its tools.
      limits: of each of its tools; a `timeout_s` is needed.

    Raises:
      errors.MissingExtraError: mcp is not installed.
      errors.UserError: the target is empty, or the limits have no timeout.
    """
    try:
      import mcp  # noqa: F401 - found missing now, not in the thread.
    except ImportError as e:
      raise errors.MissingExtraError(
        f"MCP servers need mcp ({e}): pip install 'tunix_reverb[agents]'"
      ) from e
    if not target:
      raise errors.UserError('target (empty) must be a URL or a command')
    self._target = target
    self._start_timeout_s = start_timeout_s
    self._limits = limits or tool_lib.Limits()
    if self._limits.timeout_s is None:
      raise errors.UserError(
        'timeout_s (None) of an MCP server must be seconds > 0'
      )
    self._connection: _Connection | None = None
    self._tools: tuple[tool_lib.Tool, ...] = ()

  def tools(self) -> tuple[tool_lib.Tool, ...]:
    """Its tools; starts it, and starts it again where it has died.

    Raises:
      ConnectionError: it did not start, or not in time.
    """
    if self._connection is None or self._connection.is_lost:
      self.close()
      self._connection = _Connection(self._target, self._start_timeout_s)
      self._tools = tuple(map(self._tool, self._connection.listed))
    return self._tools

  def _tool(self, listed: Any) -> tool_lib.Tool:
    connection, limits = self._connection, self._limits
    schema = {'additionalProperties': True, **listed.input_schema}
    return tool_lib.Tool(
      name=listed.name,
      description=listed.description or listed.name,
      parameters=schema,
      function=lambda **arguments: connection.call(
        listed.name, arguments, limits.timeout_s
      ),
      limits=limits,
    )

  def close(self) -> None:
    """Ends the connection, and the server if it was started here."""
    connection, self._connection = self._connection, None
    if connection is not None:
      connection.close()


class _Connection:
  """A client of one server, on an event loop in a thread.

  Attributes:
    listed: the tools, as the server described them.
    ended: set when the thread is done.
    is_lost: whether the server is known to be gone.
  """

  def __init__(self, target: str | Sequence[str], timeout_s: float):
    self.ended = threading.Event()
    self.is_lost = False
    self.listed: list[Any] = []
    self._target = target
    self._loop = asyncio.new_event_loop()
    self._stop = asyncio.Event()
    self._client: Any = None
    self._ready: concurrent.futures.Future = concurrent.futures.Future()
    self._thread = threading.Thread(
      target=self._run, name='mcp_client', daemon=True
    )
    self._thread.start()
    try:
      self.listed = self._ready.result(timeout_s)
    except Exception as e:
      self.close()
      why = _reason(e) or f'no answer within {timeout_s:g} s'
      raise ConnectionError(f'MCP server {target} did not start: {why}') from e

  def _run(self) -> None:
    """The thread's life."""
    try:
      with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
        runner.run(self._serve())
    except BaseException as e:  # pylint: disable=broad-except
      if not self._ready.done():
        self._ready.set_exception(e)
      else:
        logging.warning('MCP server %s: %s', self._target, _reason(e))
    finally:
      self.is_lost = True
      self.ended.set()

  async def _serve(self) -> None:
    """Holds the connection until `close`."""
    import mcp

    target = self._target
    if not isinstance(target, str):
      target = mcp.StdioServerParameters(command=target[0], args=target[1:])
    async with mcp.Client(target) as client:
      self._client = client
      listed, cursor = [], None
      while True:
        page = await client.list_tools(cursor=cursor)
        listed += page.tools
        cursor = page.next_cursor
        if not cursor:
          break
      self._ready.set_result(listed)
      await self._stop.wait()

  def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> str:
    """Calls a tool; from any thread.

    Raises:
      taxonomy.ToolError: the tool or the server says no.
      TimeoutError: no answer in time.
    """
    if self.is_lost:
      raise taxonomy.ToolError('the MCP server has ended')
    future = asyncio.run_coroutine_threadsafe(
      asyncio.wait_for(self._client.call_tool(name, arguments), timeout_s),
      self._loop,
    )
    try:
      result = future.result(timeout_s + _MARGIN_S)
    except (TimeoutError, concurrent.futures.TimeoutError) as e:
      future.cancel()
      raise TimeoutError(f'no answer within {timeout_s:g} s') from e
    except (Exception, concurrent.futures.CancelledError) as e:
      self.is_lost = _is_loss(e)
      raise taxonomy.ToolError(_reason(e) or type(e).__name__) from e
    text = '\n'.join(map(_text, result.content))
    if result.is_error:
      raise taxonomy.ToolError(text)
    return text

  def close(self) -> None:
    """Ends the thread and what it started; waits for it."""
    if not self.ended.is_set():
      # It may end at this moment, and its loop with it.
      try:
        self._loop.call_soon_threadsafe(self._stop.set)
        if not self._ready.done() or self._client is None:
          self._loop.call_soon_threadsafe(self._cancel_all)
      except RuntimeError:
        pass
    self._thread.join(_CLOSE_TIMEOUT_S)
    if self._thread.is_alive():
      logging.warning('MCP client of %s did not end in time', self._target)

  def _cancel_all(self) -> None:
    for pending in asyncio.all_tasks(self._loop):
      pending.cancel()


def _text(part: Any) -> str:
  """One part of a result; what is no text is named."""
  text = getattr(part, 'text', None)
  return text if isinstance(text, str) else f'[{part.type}]'


def _is_loss(error: BaseException) -> bool:
  """Whether the connection is gone, rather than one request refused."""
  import mcp

  if isinstance(error, mcp.MCPError):
    return error.code == mcp.types.CONNECTION_CLOSED
  return True


def _reason(error: BaseException) -> str:
  """What went wrong, in groups of exceptions the first of them."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return str(error)
