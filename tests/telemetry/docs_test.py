"""docs/metrics.md lists exactly what `telemetry/metrics.py` does.

  PYTHONPATH=. .venv/bin/python tests/telemetry/docs_test.py

writes the page anew.
"""

import pathlib

from tunix_reverb.telemetry import metrics

_PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'metrics.md'

_INTRODUCTION = """\
# Metrics

The frozen list of everything a run reports. It is written from
`tunix_reverb/telemetry/metrics.py`, and a test keeps the two equal. A role that
writes a name which is not listed is refused.

Each process appends one JSON object per report to
`<run_dir>/metrics/<role>.jsonl` and the same numbers to
`<run_dir>/tensorboard/<role>/`. Besides the metrics a line holds `time_s` (wall
clock, seconds), `role` (such as `actor_0`) and `step`. A number that JSON does
not have is the string `nan`, `inf` or `-inf`.

- Names carry their unit. `_total` counts from the start of the process, unless
  its text says otherwise; what counts "since training began" goes on when a run
  is resumed.
- Learner, actors and replay servers report once a second, the evaluator after
  each evaluation.
- Rates, shares, fills, lags and ages are over the time since the report before;
  losses, norms and importance ratios are those of the last update. What nothing
  was measured of is absent, such as returns when no episode has ended.
"""

_ROLES = {
  metrics.LEARNER: ('Learner', 'learner steps'),
  metrics.ACTOR: ('Actors', 'actor steps of this process'),
  metrics.REPLAY_SERVER: ('Replay servers', 'reports of this process'),
  metrics.EVALUATOR: ('Evaluator', 'the version it played'),
}


def _page() -> str:
  lines = [_INTRODUCTION]
  for role, (title, step) in _ROLES.items():
    lines += [
      f'## {title}',
      '',
      f'`step` is {step}.',
      '',
      '| metric | unit | meaning |',
      '| --- | --- | --- |',
    ]
    lines += [
      f'| `{name}` | {metric.unit} | {metric.help} |'
      for name, metric in metrics.METRICS.items()
      if role in metric.roles
    ]
    lines.append('')
  return '\n'.join(lines)


def test_the_page_is_the_list():
  # Line by line, so that a difference is shown as the metric it is about.
  assert _PAGE.read_text().splitlines() == _page().splitlines()


def test_every_metric_is_on_the_page():
  """Even those of a kind of role that this page does not know."""
  text = _PAGE.read_text()
  assert not [name for name in metrics.METRICS if f'`{name}`' not in text]


if __name__ == '__main__':
  _PAGE.write_text(_page())
