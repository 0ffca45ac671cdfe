"""V-trace against rlax's, on rows of tokens, in one process.

  python -m benchmarks.vtrace [--repetitions=200]

Times `ops.vtrace` on a batch of rows and rlax's functions under `vmap`, jitted,
both in float32 and from the same inputs (log ratios, as policies give them):
the errors of the values alone (`rlax.vtrace`), and errors and advantages
(`rlax.vtrace_td_error_and_advantage`). All take turns, so that whatever else
the machine does hits them alike; figures are medians. Needs rlax, which
`make test` installs.
"""

from __future__ import annotations

import json
import statistics
import time

from absl import app
from absl import flags

_REPETITIONS = flags.DEFINE_integer(
  'repetitions', 200, 'Calls of each function to take the median of.'
)
_SHAPES = ((32, 1024), (8, 16384))
_TARGET = 1.0
_TOLERANCE = 1e-4  # Of the largest error, between ours and rlax's.


def _inputs(rows: int, length: int):
  """(values [B, L + 1], rewards, discounts, log ratios, all [B, L])."""
  import jax.numpy as jnp
  import numpy as np

  rng = np.random.default_rng(0)
  as_f32 = lambda x: jnp.asarray(x, jnp.float32)
  return (
    as_f32(rng.normal(size=(rows, length + 1))),
    as_f32(rng.normal(size=(rows, length))),
    as_f32(rng.uniform(0.95, 1.0, (rows, length))),
    as_f32(0.3 * rng.normal(size=(rows, length))),
  )


def _functions(rows: int, length: int):
  """name -> (jitted function, arguments); it returns what rlax's returns."""
  import jax
  import jax.numpy as jnp
  import rlax

  from tunix_reverb.ops import recurrence
  from tunix_reverb.ops import vtrace

  values, rewards, discounts, log_rhos = _inputs(rows, length)
  # Ours has L positions with a transition at each but the last; the same L for
  # rlax, which is given the value after each transition.
  theirs = (values[:, :-1], values[:, 1:], rewards, discounts, log_rhos)
  is_transition = jnp.ones((rows, length), bool).at[:, -1].set(False)
  ours = (values[:, :-1], rewards, discounts, log_rhos, is_transition)

  def errors_of_rlax(v_tm1, v_t, r_t, discount_t, log_rho):
    return rlax.vtrace(v_tm1, v_t, r_t, discount_t, jnp.exp(log_rho))

  def both_of_rlax(v_tm1, v_t, r_t, discount_t, log_rho):
    output = rlax.vtrace_td_error_and_advantage(
      v_tm1, v_t, r_t, discount_t, jnp.exp(log_rho)
    )
    return output.errors, output.pg_advantage

  def both(form):
    def run(*arguments):
      output = vtrace.vtrace(*arguments, rows=recurrence.Rows(form=form))
      return output.errors, output.pg_advantages

    return run

  return {
    'rlax errors': (jax.jit(jax.vmap(errors_of_rlax)), theirs),
    'ours errors': (jax.jit(lambda *x: both('auto')(*x)[0]), ours),
    'rlax errors+advantages': (jax.jit(jax.vmap(both_of_rlax)), theirs),
    'ours errors+advantages': (jax.jit(both('auto')), ours),
    'ours, scan': (jax.jit(both('scan')), ours),
    'ours, associative': (jax.jit(both('associative')), ours),
  }


def _check_agreement(rows: int, length: int) -> None:
  """Raises unless ours and rlax's are of one opinion on whole segments."""
  import numpy as np

  functions = _functions(rows, length)
  # Where rlax goes on to the value after the row, ours ends: compare without
  # the last transition.
  fn, arguments = functions['rlax errors']
  theirs = np.asarray(fn(*(x[:, :-1] for x in arguments)))
  fn, arguments = functions['ours errors']
  ours = np.asarray(fn(*arguments))[:, :-1]
  difference = np.abs(ours - theirs).max() / np.abs(theirs).max()
  if not difference < _TOLERANCE:
    raise AssertionError(f'ours and rlax differ by {difference:.2g}')


def _medians_ms(functions, repetitions: int) -> dict[str, float]:
  """name -> median wall time of a call, milliseconds."""
  import jax

  for fn, arguments in functions.values():
    for _ in range(3):
      jax.block_until_ready(fn(*arguments))
  times_ms: dict[str, list[float]] = {name: [] for name in functions}
  for _ in range(repetitions):
    for name, (fn, arguments) in functions.items():
      start_s = time.perf_counter()
      jax.block_until_ready(fn(*arguments))
      times_ms[name].append(1e3 * (time.perf_counter() - start_s))
  return {name: statistics.median(times) for name, times in times_ms.items()}


def _measure(rows: int, length: int) -> tuple[dict, dict]:
  """(checks, medians) of one shape."""
  _check_agreement(rows, length)
  medians = _medians_ms(_functions(rows, length), _REPETITIONS.value)
  print(f'[{rows}, {length}], milliseconds:')
  for name, median in medians.items():
    print(f'  {name:24} {median:.3f}', flush=True)
  checks = {}
  for what in ('errors', 'errors+advantages'):
    speedup = medians[f'rlax {what}'] / medians[f'ours {what}']
    print(f'  {what}: {speedup:.2f} times as fast as rlax', flush=True)
    checks[f'{what}_{rows}x{length}_over_rlax'] = {
      'value': round(speedup, 3),
      'target': _TARGET,
      'ok': speedup > _TARGET,
    }
  return checks, {name: round(x, 4) for name, x in medians.items()}


def main(argv: list[str]) -> None:
  """Prints the figures of every shape and one line of JSON at the end."""
  del argv
  import jax

  checks, settings = {}, {}
  for rows, length in _SHAPES:
    of_shape, settings[f'{rows}x{length}'] = _measure(rows, length)
    checks |= of_shape
  print(
    json.dumps(
      {
        'benchmark': 'vtrace',
        'checks': checks,
        'settings': {
          'jax': jax.__version__,
          'backend': jax.default_backend(),
          'median_ms': settings,
        },
      }
    )
  )


if __name__ == '__main__':
  app.run(main)
