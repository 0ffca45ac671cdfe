"""Following metrics files, and what a run adds up to."""

import json
import math

import pytest

from tunix_reverb.telemetry import reader as reader_lib
from tunix_reverb.telemetry import run_state


def _line(step, role='learner', time_s=None, **values):
  time_s = float(step) if time_s is None else time_s
  return json.dumps({'time_s': time_s, 'role': role, 'step': step, **values})


@pytest.fixture
def path(tmp_path):
  (tmp_path / 'metrics').mkdir()
  return tmp_path / 'metrics' / 'learner.jsonl'


def test_only_new_rows_are_returned_and_new_files_are_found(tmp_path, path):
  reader = reader_lib.Reader(tmp_path)
  assert reader.poll() == []
  path.write_text(_line(1, loss=0.5) + '\n')
  assert [row.step for row in reader.poll()] == [1]
  assert reader.poll() == []
  with path.open('a') as file:
    file.write(_line(2) + '\n' + _line(3) + '\n')
  path.with_name('actor_0.jsonl').write_text(_line(9, role='actor_0') + '\n')
  assert [(r.role, r.step) for r in reader.poll()] == [
    ('actor_0', 9),
    ('learner', 2),
    ('learner', 3),
  ]


def test_a_half_written_line_waits_for_its_rest(tmp_path, path):
  reader = reader_lib.Reader(tmp_path)
  line = _line(1, loss=0.5) + '\n'
  for cut in (0, 1, 20, len(line) - 1):
    path.write_text(line[:cut])
    assert reader.poll() == []
  path.write_text(line)
  assert [row.values for row in reader.poll()] == [{'loss': 0.5}]
  assert reader.bad_lines == 0


@pytest.mark.parametrize(
  'bad', ['{"time_s": 1.0, "ro', '[]', '{}', '\x00\x00', '{"time_s": "x"}']
)
def test_a_broken_line_is_skipped_and_counted(tmp_path, path, bad):
  path.write_text(f'{_line(1)}\n{bad}\n\n{_line(2)}\n')
  reader = reader_lib.Reader(tmp_path)
  assert [row.step for row in reader.poll()] == [1, 2]
  assert reader.bad_lines == 1


def test_from_end_skips_the_earlier_part_of_a_resumed_run(tmp_path, path):
  path.write_text(_line(1) + '\n')
  reader = reader_lib.Reader(tmp_path, from_end=True)
  with path.open('a') as file:
    file.write(_line(2) + '\n')
  assert [row.step for row in reader.poll()] == [2]


def _state(*rows):
  state = run_state.RunState()
  state.update(
    reader_lib.Row(time_s, role, step, values)
    for time_s, role, step, values in rows
  )
  return state


def test_totals_add_up_over_processes_and_restarts():
  state = _state(
    (1.0, 'actor_0', 1, {'actor_steps_total': 100.0}),
    (2.0, 'actor_0', 2, {'actor_steps_total': 300.0}),
    (3.0, 'actor_0', 1, {'actor_steps_total': 50.0}),  # It was restarted.
    (3.0, 'actor_1', 1, {'actor_steps_total': 7.0}),
  )
  assert state.latest_sum('actor', 'actor_steps_total') == 357.0
  assert state.rate('actor_0', 'actor_steps_total') == 125.0


def test_means_and_maxima_leave_out_what_is_not_finite():
  state = _state(
    (1.0, 'learner', 1, {'policy_lag_mean': 2.0, 'policy_lag_max': 5.0}),
    (2.0, 'learner', 2, {'policy_lag_mean': math.nan, 'policy_lag_max': 4.0}),
    (3.0, 'learner', 3, {'policy_lag_mean': 4.0, 'policy_lag_max': 3.0}),
  )
  assert state.mean('learner', 'policy_lag_mean') == 3.0
  assert state.maximum('learner', 'policy_lag_max') == 5.0
  assert state.latest('learner', 'policy_lag_max') == 3.0


def test_what_was_never_written_is_nan():
  state = _state()
  assert math.isnan(state.latest('learner', 'loss'))
  assert math.isnan(state.latest_sum('actor', 'actor_steps_total'))
  assert math.isnan(state.mean('learner', 'loss'))
  assert math.isnan(state.maximum('learner', 'loss'))
  assert math.isnan(state.rate('learner', 'learner_step'))
  assert state.drops() == {}


def test_evaluations_and_drops_are_collected():
  state = _state(
    (1.0, 'learner', 1, {'dropped_lag_total': 3.0, 'dropped_age_total': 0.0}),
    (
      2.0,
      'evaluator',
      4,
      {
        'evaluation_return_mean': 0.5,
        'evaluation_return_std': 0.1,
        'evaluation_episodes': 100.0,
        'policy_version': 17.0,
      },
    ),
    (3.0, 'actor_0', 4, {'episode_return_mean': 0.25}),
  )
  assert state.drops() == {'lag': 3}
  assert list(state.training_returns) == [0.25]
  assert list(state.evaluations) == [
    run_state.Evaluation(2.0, 17, 100, 0.5, 0.1)
  ]
