"""Counters of calls and errors."""

from tunix_reverb.environments.tools import statistics
from tunix_reverb.environments.tools import transcript


def _episode(*calls, outcome='terminated', parser_errors=()):
  turn = transcript.Turn([], '', '', list(calls), list(parser_errors))
  return transcript.Transcript(0, 0, [], [], [turn], outcome=outcome)


def _call(duration_s, error=None, num_attempts=1):
  return transcript.ToolCall(
    'x', {}, error=error, duration_s=duration_s, num_attempts=num_attempts
  )


def test_nothing_has_happened_yet():
  metrics = statistics.ToolStatistics().metrics()
  assert set(metrics.values()) == {0}
  assert 'tool_call_s_p50' not in metrics


def test_calls_and_errors_are_counted():
  made = statistics.ToolStatistics()
  made.add(0, _episode(_call(1.0), _call(3.0, error='tool')))
  made.add(1, _episode(_call(2.0, error='timeout'), outcome='truncated'))
  made.add(1, _episode(_call(0.0, 'parser', num_attempts=0)))
  made.add(1, _episode(parser_errors=['no JSON'], outcome='failed'))
  assert made.metrics() == {
    'tool_calls_total': 4,
    'truncated_episodes_total': 1,
    'parser_errors_total': 2,
    'tool_errors_total': 1,
    'sandbox_errors_total': 0,
    'timeout_errors_total': 1,
    'environment_errors_total': 1,
    'tool_call_s_p50': 2.0,
    'tool_call_s_p99': 2.98,
  }


def test_the_latest_calls_make_the_quantiles():
  made = statistics.ToolStatistics()
  made.add(0, _episode(*[_call(100.0) for _ in range(1000)]))
  made.add(0, _episode(*[_call(1.0) for _ in range(1000)]))
  assert made.metrics()['tool_call_s_p99'] == 1.0
