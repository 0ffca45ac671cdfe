"""What the live view and the summary say, and what drawing costs."""

import io
import json
import math
import time

import pytest
import rich.console

from tunix_reverb.telemetry import console
from tunix_reverb.telemetry import reader
from tunix_reverb.telemetry import run_state
from tunix_reverb.telemetry import summary

_GOAL = console.Goal('gym:CartPole-v1', 475.0, 'runs/x')
_STATUSES = [
  run_state.ProcessStatus('learner', 12, 0, 61.0, 'running'),
  run_state.ProcessStatus('actor_0', 0, 2, 3.0, 'waiting to restart'),
]


def _state(rows=40):
  state = run_state.RunState()
  for i in range(1, rows + 1):
    state.update(
      [
        reader.Row(
          float(i),
          'learner',
          i,
          {
            'learner_step': 100.0 * i,
            'learner_steps_per_s': 100.0,
            'transitions_per_s': 35_200.0,
            'transitions_total': 35_200.0 * i,
            'utilisation_compute': 0.7,
            'utilisation_waiting': 0.2,
            'utilisation_publishing': 0.06,
            'utilisation_other': 0.04,
            'policy_lag_mean': 2.1,
            'policy_lag_p50': 2.0,
            'policy_lag_p95': 4.0,
            'policy_lag_max': 6.0,
            'dropped_lag_total': 3.0,
            'recompiles_total': 0.0,
          },
        ),
        reader.Row(
          float(i),
          'actor_0',
          i,
          {
            'episode_return_mean': 2.0 * i,
            'actor_steps_per_s': 20_000.0,
          },
        ),
        reader.Row(
          float(i),
          'replay_server_0',
          i,
          {
            'table_items': 16.0,
            'inserts_blocked': 1.0,
            'samples_blocked': 0.0,
          },
        ),
      ]
    )
  state.update(
    [
      reader.Row(
        50.0,
        'evaluator',
        1,
        {
          'evaluation_return_mean': 321.0,
          'evaluation_return_std': 5.0,
          'evaluation_episodes': 100.0,
        },
      )
    ]
  )
  return state


def _draw(renderable):
  out = rich.console.Console(file=io.StringIO(), width=110)
  out.print(renderable)
  return out.file.getvalue()


def test_the_panel_shows_everything_a_user_watches():
  text = _draw(console.panel(_state(), _STATUSES, _GOAL, 61.0))
  for words in (
    'gym:CartPole-v1',
    '321',
    'solved at 475',
    '35,200 transitions/s',
    '100 steps/s',
    '20,000 steps/s',
    'compute 70%',
    'waiting 20%',
    'publishing 6%',
    '2.1/2/4/6',
    'lag 3',
    'recompiles',
    'runs/x',
    'holds back inserts',
    '16 items',
    'pid 12',
    'restarts 2',
    'waiting to restart',
    '█',
  ):
    assert words in text, words


def test_a_run_that_has_only_started_can_be_drawn():
  state = run_state.RunState()
  assert 'learner' in _draw(console.panel(state, _STATUSES, _GOAL, 0.1))
  state.milestones = {'learner': 'compiled 1 buckets'}
  line = console.line(state, _STATUSES, 0.1)
  assert 'starting (1 of 2 processes run)' in line
  assert 'learner: compiled 1 buckets' in line
  panel = _draw(console.panel(state, _STATUSES, _GOAL, 0.1))
  assert 'compiled 1 buckets' in panel


def test_the_plain_line_is_one_line_with_the_same_facts():
  line = console.line(_state(), _STATUSES, 61.0)
  assert '\n' not in line
  for words in (
    'step 4,000',
    '35,200 transitions/s',
    'compute 70%',
    '321',
    'lag 2.1/2/4/6',
    'dropped lag 3',
    'restarts 2',
  ):
    assert words.replace('4,000', '4000') in line, (words, line)


def test_lines_come_every_few_seconds_and_events_at_once(capsys):
  with console.Console(_GOAL, interactive=False) as view:
    for _ in range(100):
      view.update(_state(1), _STATUSES)
    view.say('actor_0 died')
  out = capsys.readouterr().out.splitlines()
  assert len(out) == 2
  assert out[1].endswith('actor_0 died')


def test_a_long_list_of_processes_is_cut_but_shows_those_in_trouble():
  running = [
    run_state.ProcessStatus(f'actor_{i}', i, 0, 1.0, 'running')
    for i in range(1, 65)
  ]
  text = _draw(console.panel(_state(1), [*running, _STATUSES[1]], _GOAL, 1.0))
  assert 'actor_0 ' in text and 'waiting to restart' in text
  assert '... and 53 more' in text


def test_the_panel_and_events_appear_on_the_screen(capsys):
  with console.Console(_GOAL, interactive=True) as view:
    view.update(_state(), _STATUSES)
    view.say('actor_0 died [status 1]')
  out = capsys.readouterr().out
  assert 'actor_0 died [status 1]' in out
  assert 'gym:CartPole-v1' in out and 'holds back inserts' in out


def test_drawing_twice_a_second_costs_little_of_a_core():
  state, out = _state(), rich.console.Console(file=io.StringIO(), width=110)

  def draw_s():
    start_s = time.thread_time()
    out.print(console.panel(state, _STATUSES * 4, _GOAL, 61.0))
    return time.thread_time() - start_s

  assert min(draw_s() for _ in range(20)) < 0.02


@pytest.mark.parametrize(
  ('value', 'text'),
  [
    (math.nan, '-'),
    (0.0, '0'),
    (35_200.4, '35,200'),
    (0.03124, '0.0312'),
    (2.0, '2'),
    (-1.0, '-1'),
    (math.inf, 'inf'),
  ],
)
def test_numbers_as_people_read_them(value, text):
  assert console.number(value) == text


def test_sparklines_scale_to_their_range():
  assert console.sparkline([]) == ''
  assert console.sparkline([math.nan]) == ''
  assert console.sparkline([1, 1]) == '▁▁'
  assert console.sparkline([0, 7, 3.5], width=3) == '▁█▅'
  assert len(console.sparkline(range(100), width=10)) == 10


def test_the_summary_is_valid_json_and_reads_well():
  data = summary.make(
    _state(),
    reason='solved: mean return 480',
    solved=True,
    wall_s=61.23,
    restarts={'actor_0': 2},
  )
  json.dumps(data, allow_nan=False)
  assert data['transitions_per_s'] == 35_200.0
  assert data['policy_lag_max'] == 6.0
  assert data['dropped'] == {'lag': 3}
  assert data['compile_s'] is None
  text = summary.as_text(data)
  for words in (
    'yes',
    '321 +- 5 over 100 episodes',
    'compute 70%',
    'actor_0 2',
    '61.2 s',
    'max 6 publishes',
  ):
    assert words in text, (words, text)


def test_the_summary_of_a_run_that_never_learnt():
  data = summary.make(
    run_state.RunState(),
    reason='learner ended (status 1)',
    solved=None,
    wall_s=3.0,
    restarts={},
  )
  json.dumps(data, allow_nan=False)
  assert 'nothing yet' in summary.as_text(data)
  assert 'learner ended (status 1)' in summary.as_text(data)
