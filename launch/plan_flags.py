"""The flags of `launch.plan`, and what they ask for."""

from __future__ import annotations

from typing import Any

from absl import flags

from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import presets
from tunix_reverb.sharding import topologies

_AXES = {
  'data': 'hold copies of the params, and rows of their own',
  'fsdp': 'share the params, and hold rows of their own',
  'sequence': 'share the positions of a row',
  'tensor': 'share heads, features and vocabulary',
}


def define() -> None:
  """Defines them; idempotent."""
  if 'topology' in flags.FLAGS:
    return
  flags.DEFINE_enum(
    'model', 'llama3-70b', sorted(presets.PRESETS), 'Which transformer.'
  )
  flags.DEFINE_string(
    'topology',
    'v5p-256',
    'What it runs on, by the name one orders it by: v5p-256 (cores), v5e-256 '
    '(chips), v6e-64, v5p:4x4x8 (shape), h200-8, or cpu-8.',
  )
  for axis, use in _AXES.items():
    flags.DEFINE_integer(
      f'{axis}_axis', 0, f'Devices that {use}; 0: suggested.', lower_bound=0
    )
  flags.DEFINE_integer(
    'row_length', 8192, 'Positions of a packed row, in tokens.', lower_bound=1
  )
  flags.DEFINE_integer(
    'rows',
    0,
    'Rows of a global batch; 0: one for each micro-batch of data x fsdp.',
    lower_bound=0,
  )
  flags.DEFINE_integer(
    'micro_batches',
    1,
    'Parts of a batch whose gradients are summed one after the other.',
    lower_bound=1,
  )
  compute = config_lib.ComputeConfig()
  flags.DEFINE_enum(
    'dtype', compute.dtype, config_lib.COMPUTE_DTYPES, 'Inside of the blocks.'
  )
  flags.DEFINE_enum(
    'remat',
    compute.remat,
    config_lib.REMAT_POLICIES,
    'What the forward pass keeps, from the least memory to the most.',
  )
  flags.DEFINE_enum(
    'compiler',
    'cpu',
    ['cpu', 'tpu'],
    "cpu: any topology, in seconds. tpu: the TPU's own compiler, in minutes; "
    'needs the extra tpu-plan, in the modern lane.',
  )


def request(topology: topologies.Topology) -> Any:
  """`meshes.Request` of the flags; loads JAX.

  Args:
    topology: parsed from its flag.
  """
  from tunix_reverb.agents.transformer.plan import meshes
  from tunix_reverb.agents.transformer.plan import settings

  values = flags.FLAGS
  return meshes.Request(
    model_name=values.model,
    model=presets.get(values.model),
    compute=config_lib.ComputeConfig(dtype=values.dtype, remat=values.remat),
    topology=topology,
    mesh=settings.MeshSizes(*(values[f'{axis}_axis'].value for axis in _AXES)),
    row_length=values.row_length,
    num_rows=values.rows,
    num_micro_batches=values.micro_batches,
  )
