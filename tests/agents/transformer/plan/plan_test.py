"""Plans against what a real update on eight virtual devices is made of."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.agents.transformer.plan import changes as changes_lib
from tunix_reverb.agents.transformer.plan import estimate as estimate_lib
from tunix_reverb.agents.transformer.plan import meshes
from tunix_reverb.agents.transformer.plan import plan as plan_lib
from tunix_reverb.agents.transformer.plan import program as program_lib
from tunix_reverb.agents.transformer.plan import report
from tunix_reverb.agents.transformer.plan import settings as settings_lib
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.networks.transformer import presets
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import topologies

_MIB, _GIB = 2**20, 2**30
# Wide for its depth, so that params, activations and gathers all count.
_MODEL = dataclasses.replace(
  presets.get('10m'),
  vocabulary_size=1024,
  num_layers=4,
  model_size=512,
  mlp_size=1024,
)


def _settings(mesh=(1, 2, 2, 2), topology='v5e-8', compute=None, **changes):
  values = {'row_length': 1024, 'num_rows': 4, 'num_micro_batches': 2}
  return settings_lib.Settings(
    model_name='small',
    model=_MODEL,
    compute=compute or config_lib.ComputeConfig(),
    topology=topologies.parse(topology),
    mesh=settings_lib.MeshSizes(*mesh),
    **(values | changes),
  )


def _request(settings):
  return meshes.Request(
    model_name=settings.model_name,
    model=settings.model,
    compute=settings.compute,
    topology=settings.topology,
    mesh=settings.mesh,
    row_length=settings.row_length,
    num_rows=settings.num_rows,
    num_micro_batches=settings.num_micro_batches,
  )


@pytest.fixture(scope='module')
def program():
  return program_lib.compile_update(_settings())


def _live_bytes(tree):
  """On the first device."""
  device = jax.devices()[0]
  return sum(
    shard.data.nbytes
    for x in jax.tree_util.tree_leaves(tree)
    for shard in x.addressable_shards
    if shard.device == device
  )


def _real_update(settings):
  """(update, live state, live batch) as a learner makes them."""
  mesh = mesh_lib.make_mesh(jax.devices(), **settings.mesh._asdict())
  model = model_lib.make_transformer(settings.model, mesh, settings.compute)
  objective = objectives.token_objective(model, objectives.LossConfig())
  optimiser = optimiser_lib.make_optimiser(
    learning_rate=3e-4,
    learning_rate_end=1.0,
    decay_steps=10,
    max_grad_norm=1.0,
  )
  state = update_lib.init_state(
    objective, optimiser, mesh, key=jax.random.PRNGKey(0)
  )
  shape = (settings.num_rows, settings.row_length)
  ones, zeros = np.ones(shape, np.int32), np.zeros(shape, np.float32)
  batch = program_lib.types.Batch(
    observation=ones,
    action=ones,
    reward=zeros,
    discount=zeros + 1,
    behaviour_log_prob=zeros - 8,
    policy_version=ones,
    loss_mask=ones.astype(bool),
    is_rejected=~ones.astype(bool),
    turn_id=ones,
    segment_ids=ones,
    segment_positions=np.broadcast_to(
      np.arange(shape[1], dtype=np.int32), shape
    ),
    core_state=(),
  )
  batch = mesh_lib.place_batch(batch, mesh, objective.batch_spec)
  update = update_lib.make_update(
    objective,
    optimiser,
    mesh,
    num_micro_batches=settings.num_micro_batches,
  )
  return update, state, batch


def test_bytes_are_those_of_the_live_arrays_and_of_the_real_update(program):
  settings, memory = program.settings, program.memory
  update, state, batch = _real_update(settings)
  assert memory.params == _live_bytes(state.params)
  moments = _live_bytes(state.optimiser_state)
  # Adam's count and that of the schedule.
  assert 0 <= moments - memory.optimiser <= 8
  arguments = memory.params + memory.optimiser + memory.batch
  assert arguments == _live_bytes((state, batch))
  compiled = update.lower(state, batch).compile()
  analysis = compiled.memory_analysis()
  # Two leaves of the batch, int32, are not read where ratios are per token.
  unread = 2 * 4 * settings.num_tokens / 4
  assert arguments == analysis.argument_size_in_bytes + unread
  # Constants of the loss differ, and nothing else.
  np.testing.assert_allclose(
    memory.temporary, analysis.temp_size_in_bytes, rtol=0.02
  )
  assert memory.outputs <= 1024  # All but the metrics reuse the state.
  state, metrics = compiled(state, batch)
  assert np.isfinite(metrics['loss'])
  assert memory.params == _live_bytes(state.params)


def test_flops_are_those_of_a_hand_count(program):
  settings = program.settings
  model, num_tokens = settings.model, settings.num_tokens
  heads = model.num_heads * model.head_size
  kv_heads = model.num_kv_heads * model.head_size
  down = model.mlp_size * model.model_size
  layer = 2 * (heads + kv_heads) * model.model_size + 3 * down
  # Forward once, backward twice, and forward once more but for what only the
  # next layer needs.
  products = num_tokens * model.num_layers * 2 * (4 * layer - down)
  # Logits, of a single block, once.
  head = num_tokens * 3 * 2 * model.vocabulary_size * model.model_size
  # Two products forward, five backward, for each block of 512 keys up to the
  # query's own; all is counted as of the device with the last positions.
  attention = num_tokens * model.num_layers * 7 * 2 * heads * 512 * 2
  expected = products + head + attention
  np.testing.assert_allclose(
    program.costs.flops * settings.mesh.num_devices, expected, rtol=0.01
  )
  # Nothing of the model's own FLOPs is left out, and half as much is repeated.
  model_flops = estimate_lib.model_flops(model, num_tokens, 1024)
  assert 1.2 < expected / model_flops < 1.6


def test_model_flops_are_6_for_each_param_and_token_and_attention():
  model = presets.get('llama3-70b')
  flops = estimate_lib.model_flops(model, num_tokens=1, row_length=8192)
  # 70.55 billion params less the embedding, which is looked up.
  params = 70_553_706_496 - 128_256 * 8192
  attention = 80 * 64 * 128 * 12 * 4096
  np.testing.assert_allclose(flops, 6 * params + attention, rtol=1e-4)


def test_collectives_are_those_that_the_layers_ask_for(program):
  found = {(c.kind, c.axes): c for c in program.costs.collectives}
  layers = _MODEL.num_layers * program.settings.num_micro_batches
  gathered = found['all-gather', ('fsdp', 'sequence')]
  # Seven matrices, forward and backward, and twice two of the vocabulary.
  assert 14 * layers <= gathered.count <= 14 * layers + 8
  # bfloat16 of what the other 3 of 4 devices hold, of half of the heads.
  layer = estimate_lib.num_matrix_params(_MODEL) - (
    _MODEL.vocabulary_size * _MODEL.model_size
  )
  sent = 2 * 2 * layer / 2 * 3 / 4 * program.settings.num_micro_batches
  assert sent < gathered.sent_bytes < 1.8 * sent
  assert ('reduce-scatter', ('tensor',)) in found
  assert ('all-gather', ('sequence',)) in found
  assert not any('data' in axes for _, axes in found)


@pytest.mark.parametrize(
  'mesh,dtype,remat',
  [((8, 1, 1, 1), 'bfloat16', 'attention'), ((1, 1, 2, 4), 'float32', 'layer')],
)
def test_closed_forms_are_near_the_compiler(mesh, dtype, remat):
  compute = config_lib.ComputeConfig(dtype=dtype, remat=remat)
  settings = _settings(mesh, compute=compute, num_rows=8, num_micro_batches=1)
  estimate = estimate_lib.estimate(settings)
  program = program_lib.compile_update(settings)
  assert estimate.params_bytes == program.memory.params
  # What CPUs widen to float32 makes the compiler's the larger one.
  assert 0.3 < estimate.temporary_bytes / program.memory.temporary < 1.6
  dtypes = {p.dtype for p in program.costs.products}
  assert dtypes == ({'f32'} if dtype == 'float32' else {'bf16', 'f32'})


def test_times_follow_from_the_chips_figures(program):
  plan = plan_lib.of_program(program, limit_bytes=_GIB)
  chip = plan.program.settings.topology.chip
  speed = plan.speed
  np.testing.assert_allclose(
    speed.model_s * 8 * chip.flops_per_s, plan.model_flops
  )
  sent = sum(c.sent_bytes for c in plan.program.costs.collectives)
  np.testing.assert_allclose(speed.transfer_s * chip.link_bytes_per_s, sent)
  # The head's products take three passes each.
  assert speed.product_s > plan.program.costs.flops / chip.flops_per_s
  assert speed.shortest_s < speed.longest_s
  assert 0 < speed.worst_mfu < speed.best_mfu < 1
  lines = report.describe(plan)
  assert 'small' in lines and 'on v5e-8: 8 devices, 2x4' in lines
  assert 'mesh    data 1 x fsdp 2 x sequence 2 x tensor 2' in lines
  assert lines.endswith('per device to spare')


def test_what_does_not_fit_is_told_by_how_much_and_what_to_change():
  """A change that is proposed fits, and nothing else was changed."""
  settings = _settings((1, 8, 1, 1), num_rows=16, num_micro_batches=1)
  program = program_lib.compile_update(settings)
  missing = 0.2 * program.memory.temporary
  plan = plan_lib.of_program(
    program, limit_bytes=program.memory.total - missing
  )
  assert not plan.fits
  assert report.verdict(plan) == (
    f'does not fit: {missing / _MIB:.1f} MiB too much per device'
  )
  found = changes_lib.find(plan, _request(settings))
  micro = next(change for change in found if 'micro_batches' in change.flags)
  assert micro.flags == {'micro_batches': '2'}
  assert micro.plan.fits
  assert micro.plan.program.settings == dataclasses.replace(
    settings, num_micro_batches=2
  )
  line = report.describe_change(micro)
  assert line.startswith('  --micro_batches=2: ')


def test_what_no_setting_saves_needs_a_larger_topology():
  settings = _settings(
    (1, 1, 1, 1), topology='v5e-1', num_rows=1, num_micro_batches=1
  )
  params = estimate_lib.params_bytes_per_device(_MODEL, settings.mesh)
  plan = plan_lib.make(settings, limit_bytes=2 * params)
  assert 'params and optimiser state alone are' in report.verdict(plan)
  (change,) = changes_lib.find(plan, _request(settings))
  assert change.flags['topology'] == 'v5e-4'
  assert change.plan.fits


def test_more_chips_than_devices_are_refused():
  settings = _settings((1, 16, 1, 1), topology='v5e-16', num_rows=32)
  with pytest.raises(errors.UserError, match='there are 8 virtual devices'):
    program_lib.compile_update(settings)


def test_the_tpu_compiler_is_for_tpus():
  settings = _settings(topology='cpu-8')
  with pytest.raises(errors.UserError, match='compiles for TPUs; for cpu-8'):
    program_lib.compile_update(settings, program_lib.TPU)


def test_a_refusal_of_the_tpu_compiler_says_what_it_wanted():
  message = (
    'RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, '
    'the total memory required for HLO temporaries (76.76G) exceeds available '
    'HBM (15.75G). HLO module: jit_update.'
  )
  memory = program_lib.memory_of_refusal(_settings(), message)
  assert memory.total == 76.76 * _GIB
  assert program_lib.memory_of_refusal(_settings(), 'INTERNAL: no') is None


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None,
  reason='needs libtpu, of the extra tpu-plan',
)
def test_the_tpu_compiler_agrees_with_the_one_for_cpu(program):
  on_tpu = program_lib.compile_update(program.settings, program_lib.TPU)
  assert on_tpu.memory.params == program.memory.params
  assert 0.5 < on_tpu.memory.total / program.memory.total < 2
  assert on_tpu.costs.flops == program.costs.flops
