"""What to change where a plan does not fit: each change compiled, not guessed.

Closed forms, scaled to what the compiler said of the plan, choose what is worth
compiling; only what then fits is proposed.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import itertools

from tunix_reverb.agents.transformer.plan import estimate as estimate_lib
from tunix_reverb.agents.transformer.plan import meshes
from tunix_reverb.agents.transformer.plan import plan as plan_lib
from tunix_reverb.agents.transformer.plan import program as program_lib
from tunix_reverb.agents.transformer.plan import settings as settings_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.sharding import topologies

# Compiled for each kind of change before it is given up.
_TRIES = 2
_SHORTEST_ROW = 128


@dataclasses.dataclass(frozen=True)
class Change:
  """One change that makes a plan fit.

  Attributes:
    flags: name and value of what to give on the command line.
    plan: with the change, compiled for CPU.
  """

  flags: dict[str, str]
  plan: plan_lib.Plan


_Candidate = tuple[dict[str, str], settings_lib.Settings]


def find(plan: plan_lib.Plan, request: meshes.Request) -> Iterator[Change]:
  """One change of each kind that has one, from the smallest to the largest.

  Args:
    plan: that does not fit.
    request: what it was made for.
  """
  settings = plan.program.settings
  # At most 1: what is too little to be true is found out by compiling it.
  estimated = estimate_lib.estimate(settings).temporary_bytes
  scale = min(1.0, plan.program.memory.temporary / estimated)
  for candidates in (
    _remat(settings),
    _micro_batches(settings),
    _shorter_rows(settings),
    _meshes(request, settings, plan.limit_bytes, scale),
    _meshes_row_by_row(request, settings, plan.limit_bytes, scale),
  ):
    yield from _first_that_fits(candidates, plan.limit_bytes, scale)
  yield from _larger_topology(request, settings, scale)


def _first_that_fits(
  candidates: Iterable[_Candidate], limit_bytes: float, scale: float
) -> Iterator[Change]:
  """The first one of those that are promising, if any, as an iterator."""
  promising = (
    (flags, settings)
    for flags, settings in candidates
    if _estimated_bytes(settings, scale) <= limit_bytes
  )
  for flags, settings in itertools.islice(promising, _TRIES):
    plan = plan_lib.make(settings, limit_bytes=limit_bytes)
    if plan.fits:
      yield Change(flags, plan)
      return


def _estimated_bytes(settings: settings_lib.Settings, scale: float) -> float:
  estimate = estimate_lib.estimate(settings)
  return 3 * estimate.params_bytes + scale * estimate.temporary_bytes


def _remat(settings: settings_lib.Settings) -> Iterator[_Candidate]:
  """Less kept for the backward pass."""
  kinds = config_lib.REMAT_POLICIES  # From the least memory to the most.
  for remat in reversed(kinds[: kinds.index(settings.compute.remat)]):
    compute = dataclasses.replace(settings.compute, remat=remat)
    yield {'remat': remat}, dataclasses.replace(settings, compute=compute)


def _micro_batches(settings: settings_lib.Settings) -> Iterator[_Candidate]:
  """More of them, of the same batch."""
  rows = settings.num_rows // settings.mesh.num_batch_shards
  for count in range(settings.num_micro_batches + 1, rows + 1):
    if rows % count == 0:
      yield (
        {'micro_batches': str(count)},
        dataclasses.replace(settings, num_micro_batches=count),
      )


def _shorter_rows(settings: settings_lib.Settings) -> Iterator[_Candidate]:
  """Half of the positions, and so on."""
  length = settings.row_length // 2
  unit = settings.mesh.sequence * settings.mesh.tensor
  while length >= max(_SHORTEST_ROW, unit) and length % unit == 0:
    yield (
      {'row_length': str(length)},
      dataclasses.replace(settings, row_length=length),
    )
    length //= 2


def _meshes(
  request: meshes.Request,
  settings: settings_lib.Settings,
  limit_bytes: float,
  scale: float,
) -> Iterator[_Candidate]:
  """Other ones for the same batch."""
  for candidate in meshes.ranked(
    dataclasses.replace(request, mesh=meshes.OPEN),
    limit_bytes,
    temporary_scale=scale,
  ):
    if candidate != settings:
      yield _flags(candidate, settings), candidate


def _meshes_row_by_row(
  request: meshes.Request,
  settings: settings_lib.Settings,
  limit_bytes: float,
  scale: float,
) -> Iterator[_Candidate]:
  """Other ones, on which a device works on one row of the batch at a time."""
  one_row = dataclasses.replace(
    request, mesh=meshes.OPEN, num_rows=0, num_micro_batches=1
  )
  for candidate in meshes.ranked(one_row, limit_bytes, temporary_scale=scale):
    shards = candidate.mesh.num_batch_shards
    count, rest = divmod(request.num_rows, shards)
    if count > request.num_micro_batches and not rest:
      candidate = dataclasses.replace(
        candidate, num_rows=request.num_rows, num_micro_batches=count
      )
      yield _flags(candidate, settings), candidate


def _larger_topology(
  request: meshes.Request, settings: settings_lib.Settings, scale: float
) -> Iterator[Change]:
  """The first on which some mesh fits."""
  for topology in topologies.larger(request.topology):
    if topology.num_chips > program_lib.num_devices():
      continue
    assert topology.chip is not None
    limit_bytes = topology.chip.memory_bytes
    larger = dataclasses.replace(request, topology=topology)
    for kind in (_meshes, _meshes_row_by_row):
      candidates = kind(larger, settings, limit_bytes, scale)
      for change in _first_that_fits(candidates, limit_bytes, scale):
        yield change
        return


def _flags(
  candidate: settings_lib.Settings, settings: settings_lib.Settings
) -> dict[str, str]:
  """What to give to get the candidate instead of `settings`."""
  flags = {}
  if candidate.topology != settings.topology:
    flags['topology'] = candidate.topology.name
  flags |= {
    f'{axis}_axis': str(n) for axis, n in candidate.mesh._asdict().items()
  }
  if candidate.num_micro_batches != settings.num_micro_batches:
    flags['micro_batches'] = str(candidate.num_micro_batches)
  return flags
