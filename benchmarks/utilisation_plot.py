"""Draws the figures of `benchmarks.utilisation` as one SVG, light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import html

_WIDTH, _HEIGHT = 860, 494
_LEFT, _RIGHT = 96, 24
_BAR_TOP, _BAR_HEIGHT, _BAR_STEP = 74, 24, 46
_BAR_WIDTH = 520
_CHART_TOP, _CHART_HEIGHT = 296, 160
_NAMES = {
  'serial': 'one by one',
  'batched': 'batched',
  'pipeline': 'pipeline',
}
_CAUSES = {
  'compute': 'update',
  'tools': 'waits for tools',
  'generation': 'generates',
  'starved': 'waits for data',
  'admission': 'held by admission',
  'publishing': 'publishes',
  'other': 'other',
}
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f; }
  .title { font-size: 15px; font-weight: 600; }
  .faint { fill: #57606a; font-size: 12px; }
  .page { fill: #ffffff; } .grid { stroke: #d0d7de; stroke-width: 1; }
  .compute { fill: #1a7f5a; } .tools { fill: #d9a23b; }
  .starved { fill: #c4622d; } .admission { fill: #8250a8; }
  .generation { fill: #4c82c3; } .publishing { fill: #8c959f; }
  .other { fill: #c9d1d9; }
  .line { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
  .line.serial { stroke: #d9a23b; } .line.batched { stroke: #4c82c3; }
  .line.pipeline { stroke: #1a7f5a; }
  .dot.serial { fill: #d9a23b; } .dot.batched { fill: #4c82c3; }
  .dot.pipeline { fill: #1a7f5a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .faint { fill: #9198a1; }
    .page { fill: #0d1117; } .grid { stroke: #3d444d; }
    .compute { fill: #3fb58a; } .other { fill: #4d5560; }
    .line.pipeline { stroke: #3fb58a; } .dot.pipeline { fill: #3fb58a; }
  }
"""

Curve = Sequence[tuple[float, float]]


def draw(
  results: Mapping[str, Mapping],
  curves: Mapping[str, Curve],
  *,
  best: float,
  bin_s: float,
) -> str:
  """The picture.

  Args:
    results: figures of each loop: 'shares', 'updates', 'tokens', 'wall_s'.
    curves: (seconds, mean return) of each loop.
    best: the highest mean return there can be.
    bin_s: over which the curves are averaged, seconds.
  """
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
    'role="img" aria-label="Where the learner\'s time goes, and the score over '
    'wall time, of a synchronous loop, a batched one and the pipeline">',
    f'<style>{_STYLE}</style>',
    f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
    _text(_LEFT, 28, "Where the learner's time goes", 'title'),
    *_legend(results),
  ]
  for row, name in enumerate(_NAMES):
    parts += _bar(name, results[name], _BAR_TOP + row * _BAR_STEP)
  parts += _chart({n: _mean_by_bin(curves[n], bin_s) for n in _NAMES}, best)
  return '\n'.join([*parts, '</svg>', ''])


def _text(x: float, y: float, text: str, kind: str = '', anchor='start') -> str:
  return (
    f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
    f'{html.escape(text)}</text>'
  )


def _legend(results: Mapping[str, Mapping]) -> list[str]:
  """The causes that are to be seen."""
  parts, x = [], _LEFT
  for cause, words in _CAUSES.items():
    seen = [results[name]['shares'].get(cause, 0.0) for name in _NAMES]
    if max(seen) < 0.005:
      continue
    parts += [
      f'<rect class="{cause}" x="{x}" y="44" width="12" height="12" rx="2"/>',
      _text(x + 17, 54, words, 'faint'),
    ]
    x += 38 + int(6.6 * len(words))
  return parts


def _bar(name: str, result: Mapping, y: float) -> list[str]:
  parts = [_text(_LEFT - 10, y + 17, _NAMES[name], anchor='end')]
  x = float(_LEFT)
  for cause in _CAUSES:
    width = _BAR_WIDTH * result['shares'].get(cause, 0.0)
    parts.append(
      f'<rect class="{cause}" x="{x:.1f}" y="{y}" width="{width:.1f}" '
      f'height="{_BAR_HEIGHT}"><title>{_CAUSES[cause]}: '
      f'{result["shares"].get(cause, 0.0):.1%}</title></rect>'
    )
    x += width
  rate = result['updates'] / result['wall_s']
  tokens = result['tokens'] / result['wall_s']
  x = _LEFT + _BAR_WIDTH + 12
  return [
    *parts,
    _text(x, y + 10, f'{result["shares"]["compute"]:.1%} computing'),
    _text(x, y + 26, f'{rate:.2g} updates/s, {tokens:,.0f} tokens/s', 'faint'),
  ]


def _mean_by_bin(curve: Curve, bin_s: float) -> list[tuple[float, float]]:
  """Means of the points of each bin, at their mean time."""
  bins: dict[int, list[tuple[float, float]]] = {}
  for time_s, value in curve:
    bins.setdefault(int(time_s // bin_s), []).append((time_s, value))
  return [
    (
      sum(t for t, _ in points) / len(points),
      sum(v for _, v in points) / len(points),
    )
    for _, points in sorted(bins.items())
  ]


def _chart(curves: Mapping[str, Curve], best: float) -> list[str]:
  """Mean return of training episodes over wall time."""
  longest_s = max(t for curve in curves.values() for t, _ in curve)
  width = _WIDTH - _LEFT - _RIGHT
  to_x = lambda t: _LEFT + width * t / longest_s
  to_y = lambda v: _CHART_TOP + _CHART_HEIGHT * (1 - max(v, 0.0) / best)
  parts = [
    _text(_LEFT, _CHART_TOP - 46, 'Score over wall time', 'title'),
    _text(
      _LEFT,
      _CHART_TOP - 26,
      f'mean return of the episodes that were played, {best:g} at best',
      'faint',
    ),
  ]
  for value in (0.0, best / 3, best * 2 / 3, best):
    y = to_y(value)
    parts += [
      f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" '
      f'y2="{y:.1f}"/>',
      _text(_LEFT - 10, y + 4, f'{value:.3g}', 'faint', 'end'),
    ]
  step_s = 30 if longest_s > 60 else 10
  for time_s in range(0, int(longest_s) + 1, step_s):
    y = _CHART_TOP + _CHART_HEIGHT + 20
    parts.append(_text(to_x(time_s), y, f'{time_s} s', 'faint', 'middle'))
  for name, curve in curves.items():
    points = ' '.join(f'{to_x(t):.1f},{to_y(v):.1f}' for t, v in curve)
    parts.append(f'<polyline class="line {name}" points="{points}"/>')
    parts += [_dot(name, to_x(t), to_y(v), 3) for t, v in curve]
  return parts + _chart_legend()


def _dot(name: str, x: float, y: float, radius: int) -> str:
  return f'<circle class="dot {name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


def _chart_legend() -> list[str]:
  parts, x = [], _WIDTH - _RIGHT - 330
  for name, words in _NAMES.items():
    y = _CHART_TOP - 50
    parts += [
      _dot(name, x, y, 5),
      _text(x + 11, y + 4, words, 'faint'),
    ]
    x += 110
  return parts
