"""What one process does in `processes_test`: learns, saves, publishes."""

from __future__ import annotations

import pathlib
import sys

import jax
import numpy as np

from tunix_reverb import types
from tunix_reverb.learner import checkpoints
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.networks.transformer import config as transformer_config
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import processes

# Rows are split over the processes, and params too where gloo can do it.
SIZES = (1, 2, 2, 2) if mesh_lib.has_ordered_gloo() else (2, 2, 1, 2)
TIMEOUT_S = 60.0
_ROWS, _LENGTH, _VOCABULARY = 8, 16, 24
_MODEL = transformer_config.TransformerConfig(
  vocabulary_size=_VOCABULARY,
  num_layers=2,
  model_size=16,
  mlp_size=24,
  num_heads=4,
  num_kv_heads=4,
  head_size=4,
)
_COMPUTE = transformer_config.ComputeConfig(
  dtype='float32', attention='blocked', attention_block=8, head_block=8
)
_OPTIMISER = optimiser_lib.make_optimiser(
  learning_rate=1e-3, learning_rate_end=1.0, decay_steps=10, max_grad_norm=1.0
)


def make_objective(sizes):
  """(objective, mesh) of all devices there are, by process."""
  mesh = mesh_lib.make_mesh(
    processes.by_process(jax.devices())[: int(np.prod(sizes))],
    **dict(zip(mesh_lib.AXES, sizes)),
  )
  model = model_lib.make_transformer(_MODEL, mesh, _COMPUTE)
  loss = objectives.LossConfig(entropy_cost=0.05)
  return objectives.token_objective(model, loss), mesh


def template(sizes):
  """What a checkpoint is restored like."""
  objective, mesh = make_objective(sizes)
  return update_lib.abstract_state(objective, _OPTIMISER, mesh)


def fresh_state(sizes):
  objective, mesh = make_objective(sizes)
  return update_lib.init_state(
    objective, _OPTIMISER, mesh, key=jax.random.PRNGKey(0)
  )


def batches():
  """Host batches of all rows, of two segments each and padding."""
  rng = np.random.default_rng(0)
  shape = (_ROWS, _LENGTH)
  normal = lambda: rng.normal(size=shape).astype(np.float32)
  token = lambda: rng.integers(0, _VOCABULARY, shape).astype(np.uint16)
  ids = np.array([[1] * 6 + [2] * 8 + [0] * 2] * _ROWS, np.int32)
  places = np.array([[*range(6), *range(8), 0, 0]] * _ROWS, np.int32)
  return [
    types.Batch(
      observation=token(),
      action=token(),
      reward=normal(),
      discount=np.ones(shape, np.float32),
      behaviour_log_prob=-3.0 + 0.3 * normal(),
      policy_version=np.ones(shape, np.int32),
      # Not the same number in each process: the denominator is of all.
      loss_mask=(rng.random(shape) < np.linspace(0.2, 0.9, _ROWS)[:, None])
      & (ids > 0),
      segment_ids=ids,
      segment_positions=places,
      core_state=(),
      turn_id=np.zeros(shape, np.int32),
      is_rejected=rng.random(shape) < 0.1,
    )
    for _ in range(3)
  ]


def learn(state, sizes, place):
  """Gradients of the first batch, then updates; (results, state)."""
  objective, mesh = make_objective(sizes)
  update = update_lib.make_update(objective, _OPTIMISER, mesh)
  gradients = jax.jit(
    mesh_lib.shard_map(
      lambda params, batch: update_lib.mean_gradients(objective, params, batch)[
        0
      ],
      mesh=mesh,
      in_specs=(objective.param_specs, objective.batch_spec),
      out_specs=objective.param_specs,
    )
  )
  placed = [place(batch, mesh, objective.batch_spec) for batch in batches()]
  results = {
    'gradients': processes.to_first(gradients(state.params, placed[0]))
  }
  losses = []
  for batch in placed:
    state, metrics = update(state, batch)
    losses.append(float(metrics['loss']))
    losses.append(float(metrics['grad_norm']))
  results['losses'] = np.array(losses)
  results['params'] = processes.to_first(state.params)
  return results, state


def flat(results):
  """Nest -> arrays by path, for `np.savez`."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(results)
  return {jax.tree_util.keystr(path): x for path, x in leaves}


def _place_own(batch, mesh, spec):
  own = jax.process_index()
  rows = _ROWS // jax.process_count()
  mine = jax.tree_util.tree_map(
    lambda x: x[own * rows : (own + 1) * rows], batch
  )
  return processes.place_local_rows(mine, mesh, spec)


def main(index: int, port: int, directory: pathlib.Path) -> None:
  """One of two processes, with four devices."""
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # As the learner's binary does: programs of gloo must not overtake another.
  jax.config.update('jax_cpu_enable_async_dispatch', False)
  jax.distributed.initialize(
    f'localhost:{port}', 2, index, initialization_timeout=int(TIMEOUT_S)
  )
  exchange = processes.Exchange(timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S)
  words = [exchange({'index': index, 'round': r}) for r in range(4)]
  assert words == [
    [{'index': 0, 'round': r}, {'index': 1, 'round': r}] for r in range(4)
  ]
  processes.check_rows(make_objective(SIZES)[1])
  checkpointer = checkpoints.LearnerCheckpointer(
    directory / 'one', max_to_keep=1
  )
  state, _ = checkpointer.restore_latest(template(SIZES))
  checkpointer.close(TIMEOUT_S)
  results, state = learn(state, SIZES, _place_own)
  checkpointer = checkpoints.LearnerCheckpointer(
    directory / 'two', max_to_keep=1
  )
  for step in (3, 4):  # The second one removes the first one.
    assert checkpointer.save(step, state, {'step': step})
    checkpointer.wait(TIMEOUT_S)
  exchange({})  # Until the first process has sealed it.
  assert checkpointer.steps() == [4]
  checkpointer.close(TIMEOUT_S)
  if index == 0:
    np.savez(directory / 'results.npz', **flat(results))
  else:
    assert results['params']['embedding'] is None
  jax.distributed.shutdown()


if __name__ == '__main__':
  main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
