"""Small statistics over the window since they were last taken.

All are for one thread.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np


class Window:
  """Mean, percentiles and maximum of the values since the last `take`."""

  def __init__(self) -> None:
    self._chunks: list[np.ndarray] = []

  def add(self, values: Any) -> None:
    """Adds a number or an array of numbers, any shape."""
    self._chunks.append(np.array(values, dtype=np.float64).reshape(-1))

  @property
  def count(self) -> int:
    """Values in the window."""
    return sum(chunk.size for chunk in self._chunks)

  def take(self) -> dict[str, float]:
    """`mean`, `std`, `p50`, `p95`, `min`, `max`; empty if nothing was added."""
    if not self.count:
      return {}
    values = np.concatenate(self._chunks)
    self._chunks = []
    p50, p95 = np.percentile(values, (50, 95))
    return {
      'mean': float(values.mean()),
      'std': float(values.std()),
      'p50': float(p50),
      'p95': float(p95),
      'min': float(values.min()),
      'max': float(values.max()),
    }


class Rate:
  """Events per second since the last `take`."""

  def __init__(self) -> None:
    self._count = 0.0
    self._taken_s = time.perf_counter()

  def add(self, count: float = 1) -> None:
    """Counts `count` events."""
    self._count += count

  def take(self) -> float:
    """Events per second of wall time since the last `take`."""
    now = time.perf_counter()
    rate = self._count / max(now - self._taken_s, 1e-9)
    self._count, self._taken_s = 0.0, now
    return rate


def prefixed(
  prefix: str, values: dict[str, float], *names: str
) -> dict[str, float]:
  """`{'policy_lag_mean': ...}` from `Window.take()`, for the given names."""
  return {f'{prefix}_{name}': values[name] for name in names if name in values}
