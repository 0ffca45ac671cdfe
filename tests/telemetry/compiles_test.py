"""Compilations are seen and counted; cache hits are not."""

import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb.telemetry import compiles


def test_a_new_shape_after_warm_up_is_a_recompile():
  counter = compiles.CompileCounter()
  double = jax.jit(lambda x: x * 2)
  double(np.ones(3, np.float32)).block_until_ready()
  assert counter.compiles >= 1 and counter.compile_s > 0
  assert counter.recompiles == 0
  counter.mark_warm()
  double(np.zeros(3, np.float32)).block_until_ready()
  assert counter.recompiles == 0
  double(np.ones(4, np.float32)).block_until_ready()
  assert counter.recompiles == 1


def test_ahead_of_time_compilation_counts_and_its_calls_do_not():
  counter = compiles.CompileCounter()
  x = jnp.zeros(5)
  before = counter.compiles
  compiled = jax.jit(lambda x: x + 1).lower(x).compile()
  assert counter.compiles == before + 1
  counter.mark_warm()
  compiled(x).block_until_ready()
  assert counter.recompiles == 0
