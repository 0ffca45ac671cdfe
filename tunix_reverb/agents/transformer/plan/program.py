"""The learner's update, compiled for a topology from shapes alone.

No param is ever allocated: arguments are `jax.ShapeDtypeStruct` with shardings.
XLA's CPU compiler stands in for others; it needs as many virtual devices as the
topology has chips. With libtpu installed, TPU topologies are compiled for by
their own compiler.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import time
from typing import Any

import jax
import jax.numpy as jnp

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.agents.transformer.plan import estimate as estimate_lib
from tunix_reverb.agents.transformer.plan import settings as settings_lib
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.sharding import hlo
from tunix_reverb.sharding import mesh as mesh_lib

CPU, TPU = 'cpu', 'tpu'
COMPILERS = (CPU, TPU)

_GIB = 2**30
# Of the machine code, which never runs; memory is laid out before it is made.
_UNOPTIMISED = {'xla_backend_optimization_level': 0}
# What the TPU compiler says of a program that does not fit.
_OUT_OF_MEMORY = re.compile(r'\(([\d.]+)G\) exceeds available HBM')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
  """Bytes of one device during an update.

  Attributes:
    params: float32.
    optimiser: Adam's moments.
    batch: of all micro-batches, and counters.
    gradients: float32, part of the compiler's temporaries.
    activations: the rest of the temporaries: activations, gathered params.
    outputs: results that do not reuse the memory of arguments.
  """

  params: float
  optimiser: float
  batch: float
  gradients: float
  activations: float
  outputs: float

  @property
  def temporary(self) -> float:
    """What the compiler calls temporaries."""
    return self.gradients + self.activations

  @property
  def total(self) -> float:
    """All of it."""
    return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A compiled update.

  Attributes:
    settings: what it was compiled for.
    compiler: one of `COMPILERS`.
    memory: as the compiler laid it out, or, where it refused, what it wanted.
    costs: products as they are asked for; collectives, too, or, of the TPU
      compiler, as it made them.
    compile_s: seconds it took, tracing included.
  """

  settings: settings_lib.Settings
  compiler: str
  memory: Memory
  costs: hlo.Costs
  compile_s: float


def compile_update(
  settings: settings_lib.Settings, compiler: str = CPU
) -> Program:
  """Traces and compiles the update.

  Raises:
    errors.UserError: there are too few devices or no such compiler.
  """
  start_s = time.monotonic()
  devices = _devices(settings, compiler)
  mesh_shape = settings.mesh._asdict()
  lowered, argument_bytes = _lower(settings, _devices(settings, CPU))
  costs = hlo.costs(
    lowered.as_text(dialect='hlo'),
    mesh_shape,
    unknown_trips=_attention_blocks(settings),
  )
  if compiler != CPU:
    lowered, _ = _lower(settings, devices)
  options = _UNOPTIMISED if compiler == CPU else {}
  try:
    compiled = lowered.compile(compiler_options=options)
  except Exception as e:  # Its class differs between the JAX we support.
    memory = memory_of_refusal(settings, str(e))
    if memory is None:
      raise
  else:
    memory = _memory(settings, compiled.memory_analysis(), argument_bytes)
    if compiler == TPU:
      made = hlo.costs(compiled.as_text(), mesh_shape, unknown_trips=1)
      costs = hlo.Costs(made.collectives, costs.products)
  return Program(
    settings=settings,
    compiler=compiler,
    memory=memory,
    costs=costs,
    compile_s=time.monotonic() - start_s,
  )


def num_devices() -> int:
  """How large a topology can be compiled for by the CPU compiler."""
  return len(jax.devices(CPU))


def memory_of_refusal(
  settings: settings_lib.Settings, message: str
) -> Memory | None:
  """What a program would need that the TPU compiler refuses for its memory.

  Args:
    settings: what was compiled.
    message: of the error; None is returned if it is about something else.
  """
  match = _OUT_OF_MEMORY.search(message)
  if not match:
    return None
  params = estimate_lib.params_bytes_per_device(settings.model, settings.mesh)
  return Memory(
    params=params,
    optimiser=2 * params,
    batch=0.0,
    gradients=params,
    activations=float(match[1]) * _GIB - 4 * params,
    outputs=0.0,
  )


def _devices(settings: settings_lib.Settings, compiler: str) -> list[Any]:
  topology = settings.topology
  if compiler == CPU:
    devices = jax.devices(CPU)
    if len(devices) < topology.num_chips:
      raise errors.UserError(
        f'topology ({topology.name}) has {topology.num_chips} chips, and there '
        f'are {len(devices)} virtual devices; see '
        '--xla_force_host_platform_device_count'
      )
    return devices[: topology.num_chips]
  if topology.chip is None or topology.chip.platform != 'tpu':
    raise errors.UserError(
      f'compiler ({compiler}) compiles for TPUs; for {topology.name} take cpu'
    )
  if importlib.util.find_spec('libtpu') is None:
    raise errors.MissingExtraError(
      'compiler (tpu) needs libtpu, of the modern lane: '
      "pip install 'tunix_reverb[tpu-plan]'"
    )
  # Here, because old JAX has other topologies in it.
  from jax.experimental import topologies

  return list(
    topologies.get_topology_desc(
      platform='tpu', topology_name=topology.compiler_name
    ).devices
  )


def _lower(
  settings: settings_lib.Settings, devices: list[Any]
) -> tuple[Any, float]:
  """(lowered update, bytes of state and batch on one device)."""
  mesh = mesh_lib.make_mesh(devices, **settings.mesh._asdict())
  model = model_lib.make_transformer(settings.model, mesh, settings.compute)
  objective = objectives.token_objective(model, objectives.LossConfig())
  # Rates and bounds are constants of the program and change no size.
  optimiser = optimiser_lib.make_optimiser(
    learning_rate=1e-5,
    learning_rate_end=0.0,
    decay_steps=1000,
    max_grad_norm=1.0,
  )
  update = update_lib.make_update(
    objective, optimiser, mesh, num_micro_batches=settings.num_micro_batches
  )
  state = update_lib.abstract_state(objective, optimiser, mesh)
  batch = _abstract_batch(
    settings, jax.sharding.NamedSharding(mesh, objective.batch_spec)
  )
  return update.lower(state, batch), _bytes_per_device((state, batch))


def _bytes_per_device(tree: types.Nest) -> float:
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree_util.tree_leaves(tree)
  )


def _abstract_batch(
  settings: settings_lib.Settings, sharding: jax.sharding.NamedSharding
) -> types.Batch:
  """What the packer makes of token trajectories, in shapes."""

  def leaf(dtype: Any) -> jax.ShapeDtypeStruct:
    shape = (settings.num_rows, settings.row_length)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  return types.Batch(
    observation=leaf(jnp.int32),
    action=leaf(jnp.int32),
    reward=leaf(jnp.float32),
    discount=leaf(jnp.float32),
    behaviour_log_prob=leaf(jnp.float32),
    policy_version=leaf(jnp.int32),
    loss_mask=leaf(jnp.bool_),
    is_rejected=leaf(jnp.bool_),
    turn_id=leaf(jnp.int32),
    segment_ids=leaf(jnp.int32),
    segment_positions=leaf(jnp.int32),
    core_state=(),
  )


def _attention_blocks(settings: settings_lib.Settings) -> float:
  """Blocks of keys that a block of queries meets, in rows of one segment.

  Of the last device along `sequence`, which has the most to do.
  """
  block = settings.compute.attention_block
  shard = settings.row_length // settings.mesh.sequence
  q_blocks = -(-shard // block)
  kv_blocks = -(-settings.row_length // block)
  return kv_blocks - (q_blocks - 1) / 2


def _memory(
  settings: settings_lib.Settings, analysis: Any, argument_bytes: float
) -> Memory:
  params = estimate_lib.params_bytes_per_device(settings.model, settings.mesh)
  temporary = float(analysis.temp_size_in_bytes)
  return Memory(
    params=params,
    optimiser=2 * params,
    # The program is without leaves that it does not read, and a chip may pad.
    batch=max(argument_bytes, analysis.argument_size_in_bytes) - 3 * params,
    gradients=params,
    activations=temporary - params,
    outputs=max(
      0.0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    ),
  )
