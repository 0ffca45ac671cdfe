"""The account at the end: what was dropped, and whether that is biased."""

import pytest

from tunix_reverb.telemetry import reader
from tunix_reverb.telemetry import run_state
from tunix_reverb.telemetry import summary as summary_lib


def _text(**learner):
  state = run_state.RunState()
  values = {'learner_step': 10.0, **learner}
  state.update([reader.Row(time_s=1.0, role='learner', step=10, values=values)])
  summary = summary_lib.make(
    state, reason='stopped', solved=None, wall_s=1.0, restarts={}
  )
  return summary, summary_lib.as_text(summary)


def _deciles(*counts):
  return {f'dropped_decile_{i}_total': float(n) for i, n in enumerate(counts)}


def test_drops_that_depend_on_the_length_are_called_biased():
  deciles = _deciles(0, 1, 0, 0, 0, 0, 0, 2, 0, 1057)
  summary, text = _text(dropped_lag_total=1060.0, **deciles)
  assert summary['dropped_by_length_decile'] == [
    0,
    1,
    0,
    0,
    0,
    0,
    0,
    2,
    0,
    1057,
  ]
  (line,) = [s for s in text.splitlines() if 'dropped by length' in s]
  assert '0 1 0 0 0 0 0 2 0 1,057' in line
  assert 'long trajectories are lost more often' in line
  assert '--admission' in line


def test_drops_of_all_lengths_are_told_without_alarm():
  _, text = _text(dropped_age_total=100.0, **_deciles(*[10] * 10))
  (line,) = [s for s in text.splitlines() if 'dropped by length' in s]
  assert '10 10 10' in line and 'biased' not in line


@pytest.mark.parametrize('cause', ['shutdown', 'poison'])
def test_without_stale_drops_there_is_no_such_line(cause):
  deciles = _deciles(0, 0, 0, 0, 0, 0, 0, 0, 0, 9)
  _, text = _text(**{f'dropped_{cause}_total': 9.0}, **deciles)
  assert 'dropped by length' not in text
  assert f'{cause} 9' in text
