"""What the learner did since the last report, as metrics."""

from __future__ import annotations

from tunix_reverb import types
from tunix_reverb.batching import packer
from tunix_reverb.telemetry import drops as drops_lib
from tunix_reverb.telemetry import statistics
from tunix_reverb.telemetry import timing


class LearnerReport:
  """Gathers rates, policy lags, ages, fill and drops between reports.

  Attributes:
    transitions_total: learnt since training began.
    learnt_here: of them, those in this process since it began.
  """

  def __init__(
    self,
    drops: drops_lib.DropCounter,
    account: timing.TimeAccount,
    *,
    num_processes: int = 1,
  ):
    """Reports `drops` and the time of `account` beside its own figures.

    Args:
      drops: what was dropped.
      account: where the time went.
      num_processes: that each have an equal part of every batch.
    """
    self._num_processes = num_processes
    self._drops = drops
    self._account = account
    self.transitions_total = 0
    self.learnt_here = 0
    self._elsewhere = 0
    self._steps = statistics.Rate()
    self._transitions = statistics.Rate()
    self._lags = statistics.Window()
    self._ages_s = statistics.Window()
    self._fills = statistics.Window()

  def add(
    self, packed: types.PackedBatch, learner_version: int, now_s: float
  ) -> None:
    """Counts one update.

    Args:
      packed: what it was made on.
      learner_version: version when `packed` was handed to it.
      now_s: time of that, seconds since the epoch.
    """
    segments = packed.segments
    transitions = int(segments.length.sum())
    self.learnt_here += transitions
    self._count(transitions)
    self._steps.add()
    self._lags.add(learner_version - segments.policy_version)
    self._ages_s.add(now_s - segments.created_at_s)
    self._fills.add(packer.fill(packed) * self._num_processes)

  def set_elsewhere(self, transitions: int) -> None:
    """Says how many the other processes of the learner have learnt."""
    self._count(transitions - self._elsewhere)
    self._elsewhere = transitions

  def _count(self, transitions: int) -> None:
    self.transitions_total += transitions
    self._transitions.add(transitions)

  def take(self) -> dict[str, float]:
    """The metrics since the last call."""
    prefixed = statistics.prefixed
    metrics = {
      'learner_steps_per_s': self._steps.take(),
      'transitions_per_s': self._transitions.take(),
      'transitions_total': float(self.transitions_total),
      **prefixed('policy_lag', self._lags.take(), 'mean', 'p50', 'p95', 'max'),
      **prefixed('age_s', self._ages_s.take(), 'mean', 'p95', 'max'),
    }
    fills = self._fills.take()
    if fills:
      metrics['batch_fill'] = fills['mean']
    for name, fraction in self._account.take().items():
      metrics[f'utilisation_{name}'] = fraction
    return metrics | self.drops()

  def drops(self) -> dict[str, float]:
    """What was dropped since the process began, as metrics."""
    by_cause = self._drops.by_cause().items()
    return {
      **{f'dropped_{cause}_total': float(count) for cause, count in by_cause},
      **{
        f'dropped_decile_{decile}_total': float(count)
        for decile, count in enumerate(self._drops.by_decile())
      },
    }
