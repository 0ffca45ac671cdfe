"""What the learner did since the last report, as metrics."""

from __future__ import annotations

import time

import numpy as np

from tunix_reverb import types
from tunix_reverb.batching import packer
from tunix_reverb.staleness import drops as drops_lib
from tunix_reverb.telemetry import timing


class LearnerReport:
  """Gathers rates, policy lags, ages, fill and drops between reports."""

  def __init__(
      self, drops: drops_lib.DropCounter, account: timing.TimeAccount
  ):
    """Reports `drops` and the time of `account` beside its own figures."""
    self._drops = drops
    self._account = account
    self.transitions_total = 0
    self._since_s = time.monotonic()
    self._steps = 0
    self._transitions = 0
    self._lags: list[np.ndarray] = []
    self._ages_s: list[np.ndarray] = []
    self._fills: list[float] = []

  def add(self, packed: types.PackedBatch, learner_version: int) -> None:
    """Counts one update on `packed`, at the version it was handed over at."""
    segments = packed.segments
    transitions = int(segments.length.sum())
    self._steps += 1
    self._transitions += transitions
    self.transitions_total += transitions
    self._lags.append(learner_version - segments.policy_version)
    self._ages_s.append(time.time() - segments.created_at_s)
    self._fills.append(packer.fill(packed))

  def take(self) -> dict[str, float]:
    """The metrics since the last call."""
    now_s = time.monotonic()
    elapsed_s = max(now_s - self._since_s, 1e-9)
    metrics = {
        'learner_steps_per_s': self._steps / elapsed_s,
        'transitions_per_s': self._transitions / elapsed_s,
        'transitions_total': float(self.transitions_total),
    }
    for name, fraction in self._account.take().items():
      metrics[f'utilisation_{name}'] = fraction
    if self._steps:
      metrics.update(_spread('policy_lag', np.concatenate(self._lags)))
      metrics['policy_lag_p50'] = float(
          np.percentile(np.concatenate(self._lags), 50)
      )
      metrics.update(_spread('age_s', np.concatenate(self._ages_s)))
      metrics['batch_fill'] = float(np.mean(self._fills))
    for cause, count in self._drops.by_cause().items():
      metrics[f'dropped_{cause}_total'] = float(count)
    for decile, count in enumerate(self._drops.by_decile()):
      metrics[f'dropped_decile_{decile}_total'] = float(count)
    self._since_s = now_s
    self._steps = self._transitions = 0
    self._lags, self._ages_s, self._fills = [], [], []
    return metrics


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
  return {
      f'{name}_mean': float(values.mean()),
      f'{name}_p95': float(np.percentile(values, 95)),
      f'{name}_max': float(values.max()),
  }
