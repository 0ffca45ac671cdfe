"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterator

from tunix_reverb.agents.transformer.plan import changes as changes_lib
from tunix_reverb.agents.transformer.plan import plan as plan_lib
from tunix_reverb.agents.transformer.plan import program as program_lib
from tunix_reverb.networks.transformer import params as params_lib

_GIB, _MIB = 2**30, 2**20
# The CPU compiler has been found up to 16% below the TPU's.
_CLOSE = 0.2


def describe(plan: plan_lib.Plan) -> str:
  """All of it, lines without a newline at the end."""
  return '\n'.join(
    [
      *_settings(plan),
      *_memory(plan),
      *_collectives(plan),
      *_speed(plan),
      _compiler(plan),
      verdict(plan),
    ]
  )


def verdict(plan: plan_lib.Plan) -> str:
  """One line: whether it fits, and by how much."""
  spare = plan.spare_bytes
  if not plan.fits:
    memory = plan.program.memory
    line = f'does not fit: {_size(-spare)} too much per device'
    if memory.params + memory.optimiser > plan.limit_bytes:
      state = _size(memory.params + memory.optimiser)
      line += f'; params and optimiser state alone are {state}'
    return line
  line = f'fits: {_size(spare)} per device to spare'
  chip = plan.program.settings.topology.chip
  can_ask = chip is not None and chip.platform == program_lib.TPU
  is_guess = can_ask and plan.program.compiler != program_lib.TPU
  if is_guess and spare < _CLOSE * plan.limit_bytes:
    line += ', which is near the limit; --compiler=tpu knows better'
  return line


def describe_change(change: changes_lib.Change) -> str:
  """One line: the flags, and what comes of them."""
  flags = ' '.join(f'--{k}={v}' for k, v in change.flags.items())
  total = change.plan.program.memory.total
  return f'  {flags}: {_size(total)} of {_size(change.plan.limit_bytes)}'


def _settings(plan: plan_lib.Plan) -> Iterator[str]:
  settings = plan.program.settings
  topology, compute = settings.topology, settings.compute
  shape = 'x'.join(map(str, topology.shape))
  yield (
    f'{settings.model_name}, {_count(params_lib.count(settings.model))} params,'
    f' on {topology.name}: {topology.num_chips} devices'
    + (f', {shape}' if shape else '')
  )
  yield f'mesh    {settings.mesh}'
  yield (
    f'batch   {settings.num_rows} rows of {settings.row_length} = '
    f'{settings.num_tokens} tokens, micro-batches {settings.num_micro_batches}'
  )
  yield (
    f'compute {compute.dtype}, keeps {compute.remat} for the backward pass'
    if compute.remat != 'none'
    else f'compute {compute.dtype}, keeps all for the backward pass'
  )


def _memory(plan: plan_lib.Plan) -> Iterator[str]:
  memory = plan.program.memory
  yield 'memory per device'
  for name, num_bytes in (
    ('params', memory.params),
    ('optimiser state', memory.optimiser),
    ('batch', memory.batch),
    ('gradients', memory.gradients),
    ('activations and gathered params', memory.activations),
    ('outputs', memory.outputs),
    (f'total, of {_size(plan.limit_bytes)}', memory.total),
  ):
    yield f'  {name:32} {_size(num_bytes):>10}'


def _collectives(plan: plan_lib.Plan) -> Iterator[str]:
  collectives = plan.program.costs.collectives
  if not collectives:
    return
  chip = plan.program.settings.topology.chip
  names = [' x '.join(x.axes) for x in collectives]
  width = max(map(len, names))
  yield (
    f'{"collectives per update and device":{22 + width}}   calls       sent'
    + ('  seconds' if chip else '')
  )
  for x, name in zip(collectives, names):
    yield (
      f'  {x.kind:18}  {name:{width}} {x.count:7.0f} '
      f'{_size(x.sent_bytes):>10}'
      + (f' {x.sent_bytes / chip.link_bytes_per_s:8.3f}' if chip else '')
    )


def _speed(plan: plan_lib.Plan) -> Iterator[str]:
  program, speed = plan.program, plan.speed
  num_devices = program.settings.mesh.num_devices
  yield (
    f'FLOPs per update: {plan.model_flops:.3g} of the model, '
    f'{program.costs.flops * num_devices:.3g} with what is computed twice'
  )
  if speed is None:
    return
  yield (
    f'seconds at peak: products {speed.product_s:.3f}, memory '
    f'{speed.memory_s:.3f}, transfers {speed.transfer_s:.3f}'
  )
  tokens = program.settings.num_tokens
  yield (
    f'update: {speed.shortest_s:.3f} s (MFU {speed.best_mfu:.0%}, '
    f'{tokens / speed.shortest_s:.0f} tokens/s) if all overlaps, '
    f'{speed.longest_s:.3f} s (MFU {speed.worst_mfu:.0%}) if transfers do not'
  )


def _compiler(plan: plan_lib.Plan) -> str:
  program = plan.program
  return f'compiled for {program.compiler} in {program.compile_s:.1f} s'


def _size(num_bytes: float) -> str:
  if num_bytes < _GIB:
    return f'{num_bytes / _MIB:.1f} MiB'
  return f'{num_bytes / _GIB:.2f} GiB'


def _count(number: float) -> str:
  return f'{number / 1e9:.2f}B' if number > 1e9 else f'{number / 1e6:.2f}M'
