"""A plan: what an update needs, whether that fits, and how long it takes."""

from __future__ import annotations

import dataclasses

from tunix_reverb.agents.transformer.plan import estimate as estimate_lib
from tunix_reverb.agents.transformer.plan import program as program_lib
from tunix_reverb.agents.transformer.plan import settings as settings_lib
from tunix_reverb.sharding import chips

# Reads of params, both moments and gradients, writes of all but gradients.
_UPDATE_PASSES = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  """Seconds that each part of a chip is busy in one update, at its peak.

  Attributes:
    product_s: matrix products, at the rates of their precisions.
    memory_s: their operands and results, and the optimiser.
    transfer_s: collectives, as rings that use one dimension of the torus.
    model_s: the products of the model, none of them twice, as bfloat16.
  """

  product_s: float
  memory_s: float
  transfer_s: float
  model_s: float

  @property
  def shortest_s(self) -> float:
    """An update if all of it happens at once."""
    return max(self.product_s, self.memory_s, self.transfer_s)

  @property
  def longest_s(self) -> float:
    """An update if no transfer happens while products do."""
    return max(self.product_s, self.memory_s) + self.transfer_s

  @property
  def best_mfu(self) -> float:
    """Model FLOP/s as a fraction of the peak, in the shortest update."""
    return self.model_s / self.shortest_s

  @property
  def worst_mfu(self) -> float:
    """The same in the longest one."""
    return self.model_s / self.longest_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """What is known of an update.

  Attributes:
    program: compiled.
    limit_bytes: of a device's memory.
    model_flops: see `estimate.model_flops`.
    speed: None where the chip has no figures.
  """

  program: program_lib.Program
  limit_bytes: float
  model_flops: float
  speed: Speed | None

  @property
  def spare_bytes(self) -> float:
    """What is left of a device's memory; negative if it does not fit."""
    return self.limit_bytes - self.program.memory.total

  @property
  def fits(self) -> bool:
    """Whether it can run at all."""
    return self.spare_bytes >= 0


def make(
  settings: settings_lib.Settings,
  *,
  limit_bytes: float,
  compiler: str = program_lib.CPU,
) -> Plan:
  """Compiles the update and works the plan out.

  Args:
    settings: what is planned.
    limit_bytes: of a device's memory.
    compiler: one of `program.COMPILERS`.

  Raises:
    errors.UserError: the compiler is not to be had or not for this topology.
  """
  return of_program(
    program_lib.compile_update(settings, compiler), limit_bytes=limit_bytes
  )


def of_program(program: program_lib.Program, *, limit_bytes: float) -> Plan:
  """Works the plan of a compiled update out.

  Args:
    program: the update.
    limit_bytes: of a device's memory.
  """
  settings = program.settings
  model_flops = estimate_lib.model_flops(
    settings.model, settings.num_tokens, settings.row_length
  )
  chip = settings.topology.chip
  per_device = model_flops / settings.mesh.num_devices
  return Plan(
    program=program,
    limit_bytes=limit_bytes,
    model_flops=model_flops,
    speed=_speed(program, chip, per_device) if chip else None,
  )


def _speed(
  program: program_lib.Program, chip: chips.Chip, model_flops: float
) -> Speed:
  products = program.costs.products
  passes = lambda x: (
    1 if x.dtype == 'bf16' else chip.product_passes[x.precision]
  )
  moved_bytes = sum(x.moved_bytes for x in products)
  moved_bytes += _UPDATE_PASSES * program.memory.params
  return Speed(
    product_s=sum(x.flops * passes(x) for x in products) / chip.flops_per_s,
    memory_s=moved_bytes / chip.memory_bytes_per_s,
    transfer_s=program.costs.sent_bytes / chip.link_bytes_per_s,
    model_s=model_flops / chip.flops_per_s,
  )
