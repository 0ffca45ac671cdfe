"""Names of what a learner can run on: how many chips, of which kind.

Names are those by which one orders TPUs: 'v5p-256' has 256 cores, which are 128
chips of two cores, and 'v5e-256' 256 chips; 'v5p:4x4x8' names the shape. GPUs
are counted, 'h200-8', up to what one switch connects. 'cpu-8' is eight virtual
devices of this machine, of which no speed is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
import dataclasses
import math
import re

from tunix_reverb import errors
from tunix_reverb.sharding import chips

# Slices that one orders by the number of chips, and their shapes; sources as
# for the chips.
_FLAT = {
  1: (1, 1),
  4: (2, 2),
  8: (2, 4),
  16: (4, 4),
  32: (4, 8),
  64: (8, 8),
  128: (8, 16),
  256: (16, 16),
}
_CUBES = {
  4: (2, 2, 1),
  8: (2, 2, 2),
  16: (2, 2, 4),
  32: (2, 4, 4),
  64: (4, 4, 4),
  128: (4, 4, 8),
  256: (4, 8, 8),
  512: (8, 8, 8),
  1024: (8, 8, 16),
  2048: (8, 16, 16),
  4096: (16, 16, 16),
  6144: (16, 16, 24),
}
_SLICES: Mapping[str, Mapping[int, tuple[int, ...]]] = {
  'v5e': _FLAT,
  'v5p': _CUBES,
  'v6e': _FLAT,
}
_CORES_PER_CHIP = {'v5p': 2}
_MOST_GPUS = 8
_CPU = 'cpu'
_EXAMPLES = 'v5p-256, v5e-256, v6e-64, v5p:4x4x8, h200-8 or cpu-8'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
  """So many chips of one kind, connected.

  Attributes:
    name: as one orders it.
    chip: of each; None for virtual devices on CPU.
    num_chips: each is one device.
    shape: of a TPU's torus; () for others.
  """

  name: str
  chip: chips.Chip | None
  num_chips: int
  shape: tuple[int, ...] = ()

  @property
  def compiler_name(self) -> str:
    """What `jax.experimental.topologies` calls it; TPUs only."""
    assert self.chip is not None and self.chip.platform == 'tpu'
    return f'{self.chip.name}:{"x".join(map(str, self.shape))}'


def parse(name: str) -> Topology:
  """The topology `name`.

  Raises:
    errors.UserError: there is none of that name.
  """
  match = re.fullmatch(r'([a-z]+\d*[a-z]*)(?:-(\d+)|:(\d+(?:x\d+)*))', name)
  kind = match[1].replace('v5litepod', 'v5e') if match else ''
  if match is None or (kind not in chips.CHIPS and kind != _CPU):
    raise errors.UserError(
      f'topology ({name!r}) must be a kind of chip ({_kinds()}) and a size, '
      f'such as {_EXAMPLES}'
    )
  if match[3]:
    return _shaped(name, kind, tuple(int(x) for x in match[3].split('x')))
  return _counted(name, kind, int(match[2]))


def larger(topology: Topology) -> Iterator[Topology]:
  """The next ones of its chip, from the smallest; then larger chips'."""
  if topology.chip is None:
    return
  kinds = [topology.chip.name] + [
    chip.name
    for chip in sorted(chips.CHIPS.values(), key=lambda x: x.memory_bytes)
    if chip.platform == topology.chip.platform
    and chip.memory_bytes > topology.chip.memory_bytes
  ]
  for kind in kinds:
    for num_chips in _counts(kind):
      if kind != topology.chip.name or num_chips > topology.num_chips:
        yield _counted('', kind, num_chips)


def _kinds() -> str:
  return ', '.join([*chips.CHIPS, _CPU])


def _counts(kind: str) -> list[int]:
  if kind in _SLICES:
    return list(_SLICES[kind])
  return [2**i for i in range(int(math.log2(_MOST_GPUS)) + 1)]


def _counted(name: str, kind: str, chips_or_count: int) -> Topology:
  """From a size as in the name, or, without a name, from a number of chips."""
  cores = _CORES_PER_CHIP.get(kind, 1)
  num_chips = chips_or_count // cores if name else chips_or_count
  if kind == _CPU:
    if num_chips < 1:
      raise errors.UserError('topology (cpu-0) must have at least 1 device')
    return Topology(name=name, chip=None, num_chips=num_chips)
  if num_chips not in _counts(kind) or (name and chips_or_count % cores):
    names = ', '.join(f'{kind}-{n * cores}' for n in _counts(kind))
    raise errors.UserError(
      f'topology ({kind}-{chips_or_count}) must be one of {names}, or name a '
      'shape, such as v5p:4x4x12'
    )
  return Topology(
    name=f'{kind}-{num_chips * cores}',
    chip=chips.get(kind),
    num_chips=num_chips,
    shape=_SLICES[kind][num_chips] if kind in _SLICES else (),
  )


def _shaped(name: str, kind: str, shape: tuple[int, ...]) -> Topology:
  if kind not in _SLICES:
    raise errors.UserError(
      f'topology ({name!r}) must give a number: only TPUs have shapes'
    )
  largest = max(_SLICES[kind].values())
  if len(shape) != len(largest) or any(
    not 0 < size <= most for size, most in zip(shape, largest)
  ):
    raise errors.UserError(
      f'topology ({name!r}) must have a shape of up to '
      f'{"x".join(map(str, largest))}'
    )
  return Topology(
    name=name, chip=chips.get(kind), num_chips=math.prod(shape), shape=shape
  )
