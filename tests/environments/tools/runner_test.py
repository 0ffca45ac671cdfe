"""Calls within limits: deadlines, retries, slots, and every way to fail."""

import dataclasses
import threading
import time

import pytest

from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import runner
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool


def _run(function, arguments=(), **limits):
  made = tool.tool(function, **limits)
  return runner.run(calls.Call(made.name, dict(arguments)), [made])


def test_a_call_is_recorded():
  def add(a: int, b: int) -> int:
    """Adds."""
    return a + b

  record = _run(add, {'a': 2, 'b': 3})
  assert (record.name, record.result, record.error) == ('add', '5', None)
  assert record.num_attempts == 1
  assert record.started_at_s > 1e9
  assert record.duration_s >= 0


@pytest.mark.parametrize('timeout_s', [None, 5.0])
@pytest.mark.parametrize(
  'error,kind,words',
  [
    (ValueError('no'), 'tool', 'error: ValueError: no'),
    (taxonomy.ToolError('closed'), 'tool', 'error: closed'),
    (taxonomy.SandboxError('memory'), 'sandbox', 'error: memory'),
    (TimeoutError('slow'), 'timeout', 'error: fail timed out: slow'),
    (SystemExit(3), 'tool', 'error: SystemExit: 3'),
  ],
)
def test_what_a_tool_raises_becomes_its_result(timeout_s, error, kind, words):
  def fail() -> str:
    """Fails."""
    raise error

  record = _run(fail, timeout_s=timeout_s)
  assert (record.error, record.result) == (kind, words)
  assert record.num_attempts == 1


def test_a_value_that_is_no_json_is_told_as_text():
  def odd() -> dict:
    """Returns a set."""
    return {'value': {1}}

  assert _run(odd).result == '{"value": "{1}"}'


def test_a_value_that_contains_itself_is_an_error():
  def loop() -> list:
    """Returns a circle."""
    circle = []
    circle.append(circle)
    return circle

  assert _run(loop).error == 'tool'


def test_unknown_names_and_arguments_are_the_parsers():
  def add(a: int) -> int:
    """Adds."""
    return a

  made = tool.tool(add)
  record = runner.run(calls.Call('sum', {}), [made])
  assert record.error == 'parser'
  assert record.result == "error: there is no tool 'sum'; there is add"
  assert record.num_attempts == 0
  record = runner.run(calls.Call('add', {'a': 'x'}), [made])
  assert record.error == 'parser'
  record = runner.run(calls.Call(None, 'x'), [])
  assert record.result == 'error: there are no tools'


def test_a_call_that_overruns_is_left_behind():
  release = threading.Event()

  def hang() -> None:
    """Hangs."""
    release.wait(60)

  record = _run(hang, timeout_s=0.05)
  release.set()
  assert record.error == 'timeout'
  assert record.result == 'error: hang did not answer within 0.05 s'
  assert record.duration_s >= 0.05


def test_transient_errors_are_tried_again():
  answers = [ConnectionError('reset'), taxonomy.ToolError('429'), 'fine']
  answers[1].is_transient = True

  def flaky() -> str:
    """Fails twice."""
    answer = answers.pop(0)
    if isinstance(answer, str):
      return answer
    raise answer

  record = _run(flaky, num_retries=2, back_off_s=0.01)
  assert (record.result, record.num_attempts) == ('fine', 3)
  assert record.duration_s >= 0.03  # 0.01 and 0.02.


def test_tries_end():
  def down() -> str:
    """Always fails."""
    raise ConnectionError('refused')

  record = _run(down, num_retries=2, back_off_s=0.0)
  assert (record.error, record.num_attempts) == ('tool', 3)
  assert record.result == 'error: ConnectionError: refused'


def test_no_more_calls_at_once_than_allowed():
  running, most, lock = 0, 0, threading.Lock()
  all_in = threading.Barrier(2)

  @tool.tool(max_concurrency=2, timeout_s=30.0)
  def work() -> None:
    """Works."""
    nonlocal running, most
    with lock:
      running += 1
      most = max(most, running)
    all_in.wait(20)  # Two at once, or nobody goes on.
    with lock:
      running -= 1

  records = []
  threads = [
    threading.Thread(
      target=lambda: records.append(runner.run(calls.Call('work', {}), [work]))
    )
    for _ in range(6)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert [record.error for record in records] == [None] * 6
  assert most == 2


def test_a_call_left_behind_keeps_its_slot_until_it_returns():
  release, returned = threading.Event(), threading.Event()

  @tool.tool(max_concurrency=1, timeout_s=0.05)
  def hang(once: bool) -> str:
    """Hangs, once."""
    if once:
      release.wait(60)
      returned.set()
    return 'done'

  # The limits of a copy are its own, the slots are shared.
  limits = dataclasses.replace(hang.limits, timeout_s=20.0)
  patient = dataclasses.replace(hang, limits=limits)
  call = lambda once: calls.Call('hang', {'once': once})
  assert runner.run(call(True), [hang]).error == 'timeout'
  busy = runner.run(call(False), [hang])
  assert busy.error == 'timeout'
  assert 'hang is busy: 1 other calls' in busy.result
  release.set()
  assert returned.wait(20)
  assert runner.run(call(False), [patient]).result == 'done'


def test_long_results_are_cut():
  def flood() -> str:
    """Floods."""
    return 'x' * 50

  record = _run(flood, max_result_characters=10)
  assert record.result == 'x' * 10 + '\n[40 more characters cut]'


def test_nothing_begins_that_is_too_late():
  @tool.tool
  def now() -> str:
    """Says."""
    return 'now'

  call = calls.Call('now', {})
  record = runner.run(call, [now], latest=time.monotonic() - 1.0)
  assert (record.error, record.num_attempts) == ('timeout', 0)
  assert record.result == 'error: no time is left in this turn'
  latest = time.monotonic() + 60.0
  assert runner.run(call, [now], latest=latest).result == 'now'
