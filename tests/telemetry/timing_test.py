"""Time accounts, windows and rates."""

import time

import numpy as np
import pytest

from tunix_reverb.telemetry import statistics
from tunix_reverb.telemetry import timing


def test_fractions_follow_the_clock(monkeypatch):
  now = [10.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
  account = timing.TimeAccount('compute', 'waiting')
  for name, seconds in (('compute', 3.0), ('waiting', 1.0), ('compute', 2.0)):
    with account.measure(name):
      now[0] += seconds
    now[0] += 1.0
  fractions = account.take()
  assert fractions == pytest.approx(
    {'compute': 5 / 9, 'waiting': 1 / 9, 'other': 3 / 9}
  )
  now[0] += 4.0
  assert account.take() == {'compute': 0.0, 'waiting': 0.0, 'other': 1.0}


def test_time_counts_although_the_body_raises(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
  account = timing.TimeAccount('compute')
  with pytest.raises(KeyError), account.measure('compute'):
    now[0] += 2.0
    raise KeyError
  assert account.take()['compute'] == 1.0


def test_an_unknown_part_is_refused():
  with pytest.raises(KeyError):
    timing.TimeAccount('compute').measure('computing')


def test_measuring_is_cheap():
  account = timing.TimeAccount('compute')
  best_s = min(_spans_s(account, 2000) for _ in range(10))
  assert best_s / 2000 < 5e-6  # 0.4 us on a quiet machine.


def _spans_s(account, count):
  start_s = time.perf_counter()
  for _ in range(count):
    with account.measure('compute'):
      pass
  return time.perf_counter() - start_s


def test_a_window_summarises_since_the_last_take():
  window = statistics.Window()
  assert window.take() == {}
  window.add(np.arange(100))
  window.add(100)
  assert window.count == 101
  assert window.take() == pytest.approx(
    {
      'mean': 50.0,
      'std': np.arange(101).std(),
      'p50': 50.0,
      'p95': 95.0,
      'min': 0.0,
      'max': 100.0,
    }
  )
  window.add([[1, 2], [3, 4]])
  assert window.take()['mean'] == 2.5
  assert window.take() == {}


def test_a_window_copies_what_it_is_given():
  window, values = statistics.Window(), np.ones(3)
  window.add(values)
  values[:] = 7
  assert window.take()['max'] == 1.0


def test_rates_are_per_second_since_the_last_take(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
  rate = statistics.Rate()
  rate.add(30)
  rate.add()
  now[0] = 2.0
  assert rate.take() == 15.5
  now[0] = 3.0
  assert rate.take() == 0.0


def test_prefixed_names_only_what_there_is():
  values = {'mean': 1.0, 'p50': 2.0}
  assert statistics.prefixed('policy_lag', values, 'mean') == {
    'policy_lag_mean': 1.0
  }
  assert statistics.prefixed('policy_lag', {}, 'mean', 'p50') == {}
