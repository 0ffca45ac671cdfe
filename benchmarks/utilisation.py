"""Learner utilisation where tools are slow: three loops, one task, two cores.

  python -m benchmarks.utilisation [--plot=docs/utilisation.svg]

The same transformer learns the same task (`benchmarks.slow_lookup`: texts of
about 60 tokens of which the policy writes three or four; each call of the tool
sleeps, log-normally, for almost four times as long as an update takes) from
batches of as many trajectories, by the same code, one loop after the other:

  serial     plays its batch with one environment at work at a time, then
             updates
  batched    as many environments as the pipeline has, in threads; waits for all
             of them, then updates on all they have played
  pipeline   `launch.local`: replay server, actor, admission, learner

Waits are sleeps, so that two cores suffice: one computes updates, the other
plays. Utilisation is the learner's own account, time inside the compiled update
over wall time; a learner that another process keeps from its core would count
as busy there, so the CPU time of each role is printed beside it, and tokens/s
are those of trajectories, padding left out. The pipeline is measured from its
first update on. At last `swift`, the serial loop without waits, makes as many
updates as the pipeline did: waits change no token, so this is what the serial
loop would have learnt in days. Scores are mean returns of the final params over
512 new tasks, by the most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import pathlib
import subprocess
import sys
import tempfile
import time

from absl import app
from absl import flags

from benchmarks import slow_lookup
from benchmarks import utilisation_pipeline
from benchmarks import utilisation_plot

_SECONDS = flags.DEFINE_float(
  'seconds', 300.0, 'Of the pipeline from its first update on, wall time.'
)
_SERIAL_SECONDS = flags.DEFINE_float(
  'serial_seconds', 40.0, 'After which serial begins no further round.'
)
_BATCHED_SECONDS = flags.DEFINE_float(
  'batched_seconds', 40.0, 'After which batched begins no further update.'
)
_PLOT = flags.DEFINE_string('plot', '', 'Where to draw the figures, .svg.')

_PRINT_PERIOD_S = 10.0
_BIN_S = 5.0  # Of the curves in the plot.
_LOOP_TIMEOUT_S = 600.0
_NUM_ENVIRONMENTS = 1280
_TRAJECTORIES = 128
_CONFIG_FLAGS = (
  '--agent=transformer',
  '--environment=tool:benchmarks.slow_lookup:SlowLookup',
  '--model=tiny',
  '--loss=ppo',
  '--group_size=4',
  '--advantage=rloo',
  '--num_actors=1',
  f'--environments_per_actor={_NUM_ENVIRONMENTS}',
  '--environment_mode=asynchronous',
  # The first step is answered when the engine has been compiled.
  '--environment_timeout_s=300',
  f'--trajectory_length={slow_lookup.MOST_TOKENS - 1}',
  '--bucket_lengths=144',
  '--batch_positions=9504',
  '--admission',
  f'--trajectories_per_update={_TRAJECTORIES}',
  '--max_policy_lag=32',
  '--trajectories_in_flight=2048',
  '--publish_period=1',
  '--learning_rate=0.001',
  '--learning_rate_decay_steps=800',
  '--max_grad_norm=1.0',
  '--entropy_cost=0.01',
  '--evaluation_period_s=0',
  '--learner_checkpoint_period_s=0',
  '--replay_checkpoint_period_s=0',
)


def _run_loop(loop: str, *arguments: str) -> dict[str, object]:
  """Figures of `benchmarks.utilisation_loops`, and its 'curve'."""
  process = subprocess.Popen(
    [
      sys.executable, '-m', 'benchmarks.utilisation_loops', f'--loop={loop}',
      *_CONFIG_FLAGS, *arguments,
    ],
    stdout=subprocess.PIPE,
    text=True,
  )  # fmt: skip
  curve, printed_s = [], 0.0
  deadline_s = time.monotonic() + _LOOP_TIMEOUT_S
  with process:
    assert process.stdout is not None
    try:
      for line in process.stdout:
        row = json.loads(line)
        if 'loop' in row:
          return row | {'curve': curve}
        curve.append((row['elapsed_s'], row['return']))
        if time.monotonic() - printed_s > _PRINT_PERIOD_S:
          printed_s = time.monotonic()
          _print_progress(loop, row['learner_step'], row['elapsed_s'])
        if time.monotonic() > deadline_s:
          raise TimeoutError(f'{loop} took longer than {_LOOP_TIMEOUT_S:g} s')
    finally:
      if process.poll() is None:
        process.terminate()
  raise RuntimeError(f'{loop} ended with {process.returncode}')


def _print_progress(name: str, updates: int, elapsed_s: float) -> None:
  print(f'{name}: {elapsed_s:.0f} s, {updates} updates', flush=True)


def _run_synchronous(loop: str, *arguments: str) -> dict[str, object]:
  """Of one loop in one process: its time, split by cause."""
  row = _run_loop(loop, *arguments)
  causes = ('compute', 'tools', 'generation', 'publishing')
  shares = {name: row.pop(name) for name in causes}
  shares['other'] = max(0.0, 1.0 - sum(shares.values()))
  cpu_s = {'all in one process': row.pop('cpu_s')}
  return row | {'shares': shares, 'cpu_s': cpu_s}


def _run_pipeline(directory: pathlib.Path) -> dict[str, object]:
  """Of the pipeline, and the score of what it has learnt."""
  run_dir, printed_s = directory / 'run', 0.0

  def on_row(row) -> None:
    nonlocal printed_s
    if row.time_s - printed_s > _PRINT_PERIOD_S:
      printed_s = row.time_s
      values = row.values
      print(
        f'pipeline: {values["learner_step"]:.0f} updates, '
        f'compute {values["utilisation_compute"]:.0%}',
        flush=True,
      )

  watched = utilisation_pipeline.watch(
    run_dir, _CONFIG_FLAGS, seconds=_SECONDS.value, on_row=on_row
  )
  score = _run_loop('score', f'--trained_run={run_dir}')
  return {
    **utilisation_pipeline.figures(watched),
    'curve': utilisation_pipeline.curve(watched),
    'learner_step': score['learner_step'],
    'score': score['score'],
    'score_error': score['score_error'],
  }


def _describe(name: str, result: dict) -> str:
  """A few lines on one loop."""
  wall_s = result['wall_s']
  shares = ', '.join(f'{k} {v:.1%}' for k, v in result['shares'].items())
  cpu_s = ', '.join(f'{k} {v:.1f}' for k, v in result['cpu_s'].items())
  lines = [
    f'{name}: {result["updates"]} updates in {wall_s:.1f} s '
    f'({result["updates"] / wall_s:.3f}/s), '
    f'{result["tokens"] / wall_s:,.0f} tokens/s trained',
    f'learner: {shares}',
    f'CPU seconds: {cpu_s}',
    f'policy lag mean {result["policy_lag_mean"]:.2f}, max '
    f'{result["policy_lag_max"]:.0f} publishes; dropped {result["dropped"]}; '
    f'fill of batches {result["batch_fill"]:.2f}',
    f'score {result["score"]:.3f} +- {result["score_error"]:.3f}',
  ]
  if 'first_update_s' in result:
    lines.append(f'first update after {result["first_update_s"]:.1f} s')
  if 'playing_episodes_per_s' in result:
    lines.append(
      f'playing alone: {result["playing_episodes_per_s"]:.1f} episodes/s, '
      f'{result["playing_tokens_per_cpu_s"]:,.0f} tokens per CPU-second, '
      f'{result["playing_tokens_per_sampled"]:.0f} read for each one written'
    )
  return '\n  '.join(lines)


def _checks(results: dict[str, dict]) -> dict[str, dict[str, object]]:
  serial, pipeline = results['serial'], results['pipeline']
  rate = lambda result: result['updates'] / result['wall_s']
  swift = results['swift']
  # Two standard errors of the difference: what chance does to 512 episodes.
  margin = 2 * (swift['score_error'] ** 2 + pipeline['score_error'] ** 2) ** 0.5
  at_least = lambda value, target: (value, target, value >= target)
  at_most = lambda value, target: (value, target, value <= target)
  values = {
    'serial_utilisation': at_most(serial['shares']['compute'], 0.1),
    'pipeline_utilisation': at_least(pipeline['shares']['compute'], 0.95),
    'updates_over_serial': at_least(rate(pipeline) / rate(serial), 10.0),
    'score_less_serial_at_equal_updates': at_least(
      pipeline['score'] - swift['score'], -margin
    ),
    'score_less_serial_at_equal_time': at_least(
      pipeline['score'] - serial['score'], 0.0
    ),
    'dropped': at_most(pipeline['dropped'], 0),
    # Of what the learner takes: whether one core can play that much.
    'playing_alone_over_learnt': at_least(
      swift['playing_episodes_per_s'] / (rate(pipeline) * _TRAJECTORIES), 1.0
    ),
    # Below 1 it was kept from its core while it seemed to compute.
    'learner_cpu_over_compute': at_least(
      pipeline['cpu_s']['learner']
      / (pipeline['shares']['compute'] * pipeline['wall_s']),
      1.0,
    ),
  }
  return {
    name: {'value': round(value, 4), 'target': round(target, 4), 'ok': bool(ok)}
    for name, (value, target, ok) in values.items()
  }


def _measure() -> dict[str, dict]:
  """Runs everything, one after the other."""
  results: dict[str, dict] = {}

  def take(name: str, result: dict) -> None:
    results[name] = result
    print(_describe(name, result), flush=True)

  take(
    'serial',
    _run_synchronous('serial', f'--seconds={_SERIAL_SECONDS.value}'),
  )
  take(
    'batched',
    _run_synchronous('batched', f'--seconds={_BATCHED_SECONDS.value}'),
  )
  with tempfile.TemporaryDirectory() as directory:
    take('pipeline', _run_pipeline(pathlib.Path(directory)))
  take(
    'swift',
    _run_synchronous(
      'swift', f'--updates={results["pipeline"]["learner_step"]}'
    ),
  )
  return results


def main(argv: Sequence[str]) -> None:
  """Prints the figures of every loop and one line of JSON at the end."""
  del argv
  results = _measure()
  curves = {name: result.pop('curve') for name, result in results.items()}
  if _PLOT.value:
    svg = utilisation_plot.draw(
      results, curves, best=slow_lookup.BEST_RETURN, bin_s=_BIN_S
    )
    pathlib.Path(_PLOT.value).write_text(svg)
  print(
    json.dumps(
      {
        'benchmark': 'utilisation',
        'checks': _checks(results),
        'settings': {
          'mean_wait_s': slow_lookup.MEAN_S,
          'num_environments': _NUM_ENVIRONMENTS,
          'trajectories_per_update': _TRAJECTORIES,
        },
        'figures': results,
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
