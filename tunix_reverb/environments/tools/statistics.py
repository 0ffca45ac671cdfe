"""Counts calls of tools and what went wrong, over many environments."""

from __future__ import annotations

import collections
import threading

import numpy as np

from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import transcript as transcript_lib

# Of the latest calls; the quantiles are theirs.
_KEPT_DURATIONS = 1000


class ToolStatistics:
  """Of all episodes that have ended; may be added to from several threads."""

  def __init__(self):
    self._lock = threading.Lock()
    self._errors = dict.fromkeys(taxonomy.KINDS, 0)
    self._num_calls = 0
    self._num_truncated = 0
    self._durations_s: collections.deque[float] = collections.deque(
      maxlen=_KEPT_DURATIONS
    )

  def add(self, index: int, transcript: transcript_lib.Transcript) -> None:
    """Takes an episode that is over, as `on_episode` of an environment does."""
    del index
    with self._lock:
      self._num_calls += len(transcript.calls)
      self._num_truncated += transcript.outcome == 'truncated'
      for kind, count in transcript.errors().items():
        self._errors[kind] += count
      self._durations_s.extend(
        call.duration_s for call in transcript.calls if call.num_attempts
      )

  def metrics(self) -> dict[str, float]:
    """By name; how long calls took only where there were any."""
    with self._lock:
      durations_s = list(self._durations_s)
      metrics: dict[str, float] = {
        'tool_calls_total': self._num_calls,
        'truncated_episodes_total': self._num_truncated,
        **{f'{k}_errors_total': n for k, n in self._errors.items()},
      }
    if durations_s:
      p50, p99 = np.quantile(durations_s, [0.5, 0.99])
      metrics |= {'tool_call_s_p50': float(p50), 'tool_call_s_p99': float(p99)}
    return metrics
