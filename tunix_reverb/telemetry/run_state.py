"""What is known of a run, gathered from the metrics of all its roles."""

from __future__ import annotations

import collections
from collections.abc import Iterable
import dataclasses
import math
import re

from tunix_reverb.telemetry import metrics
from tunix_reverb.telemetry import reader

_RETURNS_KEPT = 512


@dataclasses.dataclass(frozen=True)
class ProcessStatus:
  """A supervised process at one moment.

  Attributes:
    name: such as `actor_0`.
    pid: its process id; 0 if it is not running.
    restarts: how often it was restarted.
    age_s: seconds since its last start.
    state: running, ended, or waiting to restart.
  """

  name: str
  pid: int
  restarts: int
  age_s: float
  state: str


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """One evaluation: when it was reported and what it found."""

  time_s: float
  policy_version: int
  episodes: int
  return_mean: float
  return_std: float


@dataclasses.dataclass
class _Series:
  """One metric of one process. Only finite values enter mean and maximum."""

  first: float = math.nan
  last: float = math.nan
  first_s: float = math.nan
  last_s: float = math.nan
  base: float = 0.0
  total: float = 0.0
  count: int = 0
  maximum: float = -math.inf

  def add(self, value: float, time_s: float, is_total: bool) -> None:
    if is_total and value < self.last:
      self.base += self.last  # The process was restarted and counts from 0.
    if math.isnan(self.first):
      self.first, self.first_s = value, time_s
    self.last, self.last_s = value, time_s
    if math.isfinite(value):
      self.total += value
      self.count += 1
      self.maximum = max(self.maximum, value)


class RunState:
  """Latest values, totals and averages by metric name, and the returns."""

  def __init__(self) -> None:
    self._series: dict[tuple[str, str], _Series] = {}
    # The last milestone of each role's start, by role.
    self.milestones: dict[str, str] = {}
    self.training_returns: collections.deque[float] = collections.deque(
      maxlen=_RETURNS_KEPT
    )
    self.evaluations: collections.deque[Evaluation] = collections.deque(
      maxlen=_RETURNS_KEPT
    )

  def update(self, rows: Iterable[reader.Row]) -> None:
    """Takes in new rows."""
    for row in rows:
      for name, value in row.values.items():
        series = self._series.setdefault((row.role, name), _Series())
        series.add(value, row.time_s, name.endswith('_total'))
      if math.isfinite(row.values.get('episode_return_mean', math.nan)):
        self.training_returns.append(row.values['episode_return_mean'])
      if 'evaluation_return_mean' in row.values:
        self.evaluations.append(_evaluation(row))

  @property
  def has_learnt(self) -> bool:
    """Whether the learner has reported an update."""
    return (metrics.LEARNER, 'learner_step') in self._series

  def latest(self, kind: str, name: str) -> float:
    """Mean over the processes of a kind of their latest value, or NaN."""
    values = [series.last for series in self._of(kind, name)]
    return sum(values) / len(values) if values else math.nan

  def latest_sum(self, kind: str, name: str) -> float:
    """Sum over the processes of a kind of their latest value; restarts of a
    process do not reset a `_total`. NaN if there is none."""
    series = self._of(kind, name)
    return sum(s.base + s.last for s in series) if series else math.nan

  def mean(self, kind: str, name: str) -> float:
    """Mean over all rows of a kind, or NaN."""
    series = self._of(kind, name)
    count = sum(s.count for s in series)
    return sum(s.total for s in series) / count if count else math.nan

  def maximum(self, kind: str, name: str) -> float:
    """Largest value in any row of a kind, or NaN."""
    values = [s.maximum for s in self._of(kind, name) if s.count]
    return max(values) if values else math.nan

  def rate(self, role: str, name: str) -> float:
    """Growth per second of a counter from its first row to its last."""
    series = self._series.get((role, name))
    if series is None or series.last_s <= series.first_s:
      return math.nan
    growth = series.base + series.last - series.first
    return growth / (series.last_s - series.first_s)

  def drops(self) -> dict[str, int]:
    """Trajectories dropped so far, by cause; only causes that occurred."""
    counts = {
      cause: self.latest_sum(metrics.LEARNER, f'dropped_{cause}_total')
      for cause in metrics.DROP_CAUSES
    }
    return {cause: int(n) for cause, n in counts.items() if n > 0}

  def drops_by_decile(self) -> list[int]:
    """Trajectories dropped by length, shortest tenth of all first.

    Since the learner's last start; those of unknown length are left out.
    """
    counts = [
      [series.last for series in self._of(metrics.LEARNER, name)]
      for name in metrics.DECILE_NAMES
    ]
    return [int(sum(values)) for values in counts]

  def _of(self, kind: str, name: str) -> list[_Series]:
    return [
      series
      for (role, series_name), series in self._series.items()
      if series_name == name and kind_of(role) == kind
    ]


def kind_of(role: str) -> str:
  """`actor_3` -> `actor`."""
  return re.sub(r'_\d+$', '', role)


def _evaluation(row: reader.Row) -> Evaluation:
  version = row.values.get('policy_version', row.step)
  return Evaluation(
    time_s=row.time_s,
    policy_version=int(version),
    episodes=int(row.values.get('evaluation_episodes', 0)),
    return_mean=row.values['evaluation_return_mean'],
    return_std=row.values.get('evaluation_return_std', math.nan),
  )
