"""Which meshes a topology allows, and which of them is the best."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import itertools
import math

from tunix_reverb import errors
from tunix_reverb.agents.transformer.plan import estimate as estimate_lib
from tunix_reverb.agents.transformer.plan import settings as settings_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.sharding import topologies

# Of a device's memory; closed forms are this far off at times.
_MARGIN = 0.85
# Meshes whose estimated times are this close are taken to be equally fast.
_TIE = 1.02

# Any mesh.
OPEN = settings_lib.MeshSizes(0, 0, 0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """Settings of which some are left open, as 0.

  Attributes:
    model_name: see `Settings`.
    model: see `Settings`.
    compute: see `Settings`.
    topology: see `Settings`.
    mesh: sizes that are given; 0 is to be suggested, see `OPEN`.
    row_length: see `Settings`.
    num_rows: of a global batch; 0 is one for each micro-batch of each group of
      devices.
    num_micro_batches: see `Settings`.
  """

  model_name: str
  model: config_lib.TransformerConfig
  compute: config_lib.ComputeConfig
  topology: topologies.Topology
  mesh: settings_lib.MeshSizes
  row_length: int
  num_rows: int
  num_micro_batches: int


def suggest(request: Request, limit_bytes: float) -> settings_lib.Settings:
  """The fastest that fits, by estimate; else the one that needs the least.

  Raises:
    errors.UserError: there is none that divides the model and the batch.
  """
  candidates = ranked(request, limit_bytes)
  if not candidates:
    # Say what is wrong with a full mesh; of an open one, with the plainest.
    sizes = [size or 1 for size in request.mesh]
    if not request.mesh.data:
      rest = settings_lib.MeshSizes(*sizes).num_devices
      sizes[0] = max(1, request.topology.num_chips // rest)
    problem = 'no mesh divides both the model and the batch'
    try:
      _settings(request, settings_lib.MeshSizes(*sizes))
    except errors.UserError as e:
      problem = str(e)
    raise errors.UserError(
      f'{request.model_name} on {request.topology.name}: {problem}'
    )
  return candidates[0]


def ranked(
  request: Request, limit_bytes: float, *, temporary_scale: float = 1.0
) -> Sequence[settings_lib.Settings]:
  """All that divide, best first.

  Args:
    request: what is wanted.
    limit_bytes: of a device's memory.
    temporary_scale: by how much the estimate of temporaries is known to be off.
  """

  def key(settings: settings_lib.Settings) -> tuple[float, ...]:
    estimate = estimate_lib.estimate(settings)
    total = 3 * estimate.params_bytes
    total += temporary_scale * estimate.temporary_bytes
    if total > _MARGIN * limit_bytes:
      return 1, total
    # Of equally fast ones the plainest, then the one that needs the least.
    rank = round(math.log(estimate.step_s / settings.num_tokens, _TIE))
    mesh = settings.mesh
    return 0, rank, (mesh.sequence > 1) + (mesh.tensor > 1), total

  return sorted(_all(request), key=key)


def _all(request: Request) -> Iterator[settings_lib.Settings]:
  num_devices = request.topology.num_chips
  divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
  options = [[size] if size else divisors for size in request.mesh]
  for data, fsdp, sequence in itertools.product(*options[:3]):
    tensor, rest = divmod(num_devices, data * fsdp * sequence)
    if rest or request.mesh.tensor not in (0, tensor):
      continue
    mesh = settings_lib.MeshSizes(data, fsdp, sequence, tensor)
    try:
      yield _settings(request, mesh)
    except errors.UserError:
      continue


def _settings(
  request: Request, mesh: settings_lib.MeshSizes
) -> settings_lib.Settings:
  rows = request.num_rows or mesh.num_batch_shards * request.num_micro_batches
  return settings_lib.Settings(
    model_name=request.model_name,
    model=request.model,
    compute=request.compute,
    topology=request.topology,
    mesh=mesh,
    row_length=request.row_length,
    num_rows=rows,
    num_micro_batches=request.num_micro_batches,
  )
