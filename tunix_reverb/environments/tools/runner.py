"""Calls tools within their limits; what goes wrong becomes a result."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import json
import math
import queue
import threading
import time
from typing import Any

from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool as tool_lib
from tunix_reverb.environments.tools import transcript

_MAX_BACK_OFF_S = 30.0


def run(
  call: calls.Call,
  tools: Sequence[tool_lib.Tool],
  *,
  latest: float = math.inf,
) -> transcript.ToolCall:
  """Makes `call`; raises nothing but what ends a process.

  Args:
    call: what the policy wrote.
    tools: that it may call.
    latest: `time.monotonic()` after which no attempt begins.
  """
  record = transcript.ToolCall(
    name=call.name or (tools[0].name if tools else ''),
    arguments=call.arguments,
    started_at_s=time.time(),
  )
  start = time.monotonic()
  try:
    tool = _find(call.name, tools)
    arguments = tool.bind(call.arguments)
    record.result = _attempts(tool, arguments, record, latest)
  except taxonomy.ToolError as e:
    record.error, record.result = e.kind, f'error: {e}'
  record.duration_s = time.monotonic() - start
  return record


def _find(name: str | None, tools: Sequence[tool_lib.Tool]) -> tool_lib.Tool:
  for tool in tools:
    if name is None or tool.name == name:
      return tool
  known = ', '.join(tool.name for tool in tools)
  raise taxonomy.CallError(
    f'there is no tool {name!r}; there is {known}'
    if known
    else 'there are no tools'
  )


def _attempts(
  tool: tool_lib.Tool,
  arguments: Mapping[str, Any],
  record: transcript.ToolCall,
  latest: float,
) -> str:
  """Calls until it works, fails for good or was tried often enough."""
  limits = tool.limits
  while True:
    if time.monotonic() > latest:
      raise taxonomy.ToolTimeoutError('no time is left in this turn')
    record.num_attempts += 1
    try:
      return _cut(_attempt(tool, arguments), limits)
    except taxonomy.ToolError as e:
      if not e.is_transient or record.num_attempts > limits.num_retries:
        raise
    back_off_s = limits.back_off_s * 2 ** (record.num_attempts - 1)
    time.sleep(min(back_off_s, _MAX_BACK_OFF_S))


def _attempt(tool: tool_lib.Tool, arguments: Mapping[str, Any]) -> str:
  """One call; raises ToolError only."""
  try:
    if tool.limits.timeout_s is None:
      return _as_text(tool.function(**arguments))
    return _as_text(_with_deadline(tool, arguments, tool.limits.timeout_s))
  except taxonomy.ToolError:
    raise
  except TimeoutError as e:
    raise taxonomy.ToolTimeoutError(f'{tool.name} timed out: {e}') from e
  except (Exception, SystemExit) as e:  # pylint: disable=broad-except
    raise taxonomy.ToolError(
      f'{type(e).__name__}: {e}', is_transient=isinstance(e, ConnectionError)
    ) from e


def _with_deadline(
  tool: tool_lib.Tool, arguments: Mapping[str, Any], timeout_s: float
) -> Any:
  """Calls in a thread, which is left behind if it does not return in time."""
  deadline = time.monotonic() + timeout_s
  if tool.slots is not None and not tool.slots.acquire(timeout=timeout_s):
    raise taxonomy.ToolTimeoutError(
      f'{tool.name} is busy: {tool.limits.max_concurrency} other calls took '
      f'all of its {timeout_s:g} s'
    )
  answers: queue.SimpleQueue = queue.SimpleQueue()

  def work() -> None:
    try:
      answer = tool.function(**arguments), None
    except BaseException as e:  # pylint: disable=broad-except
      answer = None, e
    # First, so that a caller who goes on at once finds its slot free.
    if tool.slots is not None:
      tool.slots.release()
    answers.put(answer)

  threading.Thread(target=work, name=f'tool_{tool.name}', daemon=True).start()
  try:
    value, error = answers.get(timeout=max(0.0, deadline - time.monotonic()))
  except queue.Empty:
    raise taxonomy.ToolTimeoutError(
      f'{tool.name} did not answer within {timeout_s:g} s'
    ) from None
  if error is not None:
    raise error
  return value


def _as_text(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value, default=str)


def _cut(text: str, limits: tool_lib.Limits) -> str:
  excess = len(text) - limits.max_result_characters
  if excess <= 0:
    return text
  return (
    f'{text[: limits.max_result_characters]}\n[{excess} more characters cut]'
  )
