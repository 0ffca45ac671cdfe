"""Where the wall time of one loop goes."""

from __future__ import annotations

import time


class _Span:
  """Adds the time spent inside `with` to its total; made once per name."""

  __slots__ = ('_start_s', 'total_s')

  def __init__(self) -> None:
    self.total_s = 0.0
    self._start_s = 0.0

  def __enter__(self) -> None:
    self._start_s = time.perf_counter()

  def __exit__(self, *exc_info: object) -> None:
    self.total_s += time.perf_counter() - self._start_s


class TimeAccount:
  """Splits one thread's wall time into named parts and `other`.

  Spans of one account must not nest, and one thread uses it. About half a
  microsecond per span.

    account = TimeAccount('compute', 'waiting')
    with account.measure('waiting'):
      batch = next(batches)
    ...
    account.take()  # {'compute': 0.7, 'waiting': 0.2, 'other': 0.1}
  """

  def __init__(self, *names: str):
    self._spans = {name: _Span() for name in names}
    self._taken_s = time.perf_counter()

  def measure(self, name: str) -> _Span:
    """A context manager whose time counts as `name`."""
    return self._spans[name]

  def take(self) -> dict[str, float]:
    """Fractions of the wall time since the last `take`; they sum to 1."""
    now = time.perf_counter()
    elapsed_s = max(now - self._taken_s, 1e-9)
    self._taken_s = now
    fractions = {}
    for name, span in self._spans.items():
      fractions[name] = min(span.total_s / elapsed_s, 1.0)
      span.total_s = 0.0
    fractions['other'] = max(0.0, 1.0 - sum(fractions.values()))
    return fractions
