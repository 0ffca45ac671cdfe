"""Whether correcting for old data matters: each loss on data of old params.

  python -m benchmarks.correction [--seeds=0,1,2] [--runs=tis,vtrace]

Every run learns the reversal task of `benchmarks.lagged_reversal` at learning
rate 3e-3 from the params of 16 updates before, and has to be right in 95% of
the episodes within 150 updates: each corrected loss with every seed, the one
without correction with none. Without a lag it has to, with every seed: the
task is not what fails. Corrected means by ratios and by a pull back to the
policy that acted (`--behaviour_kl_cost`); the pull alone is run beside. Updates
at which runs hit are printed as they come; about a minute of one core for each
run, one run per core at a time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import time

from absl import app
from absl import flags

_SEEDS = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Seeds of each run.')
flags.register_validator(
  'seeds',
  lambda seeds: bool(seeds) and all(seed.isdecimal() for seed in seeds),
  message='must be whole numbers with commas between them, such as 3,4,5',
)
_RUNS = flags.DEFINE_list('runs', [], 'Runs to make, by name; none for all.')
_REPORT_PERIOD = 25
# A run is one thread, and its sums have one order.
_XLA_FLAGS = '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1'


def _measure(name: str, spec):
  """One run, its progress printed."""
  from benchmarks import lagged_reversal

  start_s = time.process_time()

  def report(step, mean, metrics):
    if step % _REPORT_PERIOD == 0:
      print(
        f'  {name} seed {spec.seed}, update {step}: {mean:.0%} right, entropy '
        f'{metrics["entropy"]:.2f}, effective samples {metrics["ess"]:.2f}',
        flush=True,
      )

  result = lagged_reversal.run(spec, report)
  end = (
    f'hit at {result.hit}' if result.hit else f'{result.last:.0%} at the end'
  )
  print(
    f'{name} seed {spec.seed}: {end}, {time.process_time() - start_s:.0f} '
    'CPU-seconds',
    flush=True,
  )
  return result


def main(argv: list[str]) -> None:
  """Prints the hits of every run and one line of JSON at the end."""
  del argv
  import jax

  from benchmarks import lagged_reversal

  seeds = [int(seed) for seed in _SEEDS.value]
  runs = lagged_reversal.runs()
  names = _RUNS.value or list(runs)
  if unknown := set(names) - set(runs):
    raise app.UsageError(
      f'--runs: {", ".join(sorted(unknown))} must be of {", ".join(runs)}'
    )
  os.environ['XLA_FLAGS'] = _XLA_FLAGS
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
    futures = {
      name: [
        pool.submit(
          _measure, name, dataclasses.replace(runs[name][0], seed=seed)
        )
        for seed in seeds
      ]
      for name in names
    }
  checks, hits = {}, {}
  for name in names:
    is_to_hit = runs[name][1]
    results = [future.result() for future in futures[name]]
    hits[name] = [result.hit or round(result.last, 3) for result in results]
    if is_to_hit is None:
      continue
    count = sum(result.hit is not None for result in results)
    target = len(seeds) if is_to_hit else 0
    checks[f'{name}_hits'] = {
      'value': count,
      'target': target,
      'ok': count == target,
    }
  print('update at which 95% were right, or the share at the end:')
  for name, of_run in hits.items():
    print(f'  {name:18} {" ".join(str(x) for x in of_run)}')
  print(
    json.dumps(
      {
        'benchmark': 'correction',
        'checks': checks,
        'settings': {'jax': jax.__version__, 'seeds': seeds, 'hits': hits},
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
