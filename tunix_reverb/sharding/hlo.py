"""What a compiled or lowered program computes and sends, read from its HLO.

XLA's own cost analysis counts the body of a loop once and knows no mesh axes.
Here every instruction counts as often as the loops around it go round, and each
collective is named after the mesh axes that its devices lie along. Text of any
stage will do: before optimisation it says what the program asks for, afterwards
what the compiler made of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
import re

_KINDS = (
  'all-gather',
  'all-reduce',
  'all-to-all',
  'collective-permute',
  'reduce-scatter',
)
# What the TPU compiler calls some reduce-scatters: fusions, written as an
# all-reduce of which each device takes a slice.
_FUSED_SCATTER = 'all-reduce-scatter'
_DTYPE_BYTES = {
  'pred': 1,
  's8': 1,
  'u8': 1,
  's16': 2,
  'u16': 2,
  'f16': 2,
  'bf16': 2,
  's32': 4,
  'u32': 4,
  'f32': 4,
  's64': 8,
  'u64': 8,
  'f64': 8,
  'c64': 8,
}
_COMPUTATION = re.compile(r'(ENTRY )?%?([^\s(]+) (?:\(.*\) -> .* )?\{')
_INSTRUCTION = re.compile(r'\s+(ROOT )?%?(\S+) = (.*)')
_OPCODE = re.compile(r' ?([a-z][a-z0-9-]*)\(')
_ARRAY = re.compile(r'\b([a-z]+\d*)\[([\d,]*)\]')
_CALLED = re.compile(
  r'\b(?:body|calls|to_apply|true_computation|false_computation)=%?([^\s,)]+)'
  r'|\bbranch_computations=\{([^}]*)\}'
)
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
  """A collective of one kind, over one set of axes, all calls of it together.

  Attributes:
    kind: HLO's name, such as 'all-gather'.
    axes: mesh axes along which the devices of a group lie.
    group_size: devices of a group, at least 2.
    count: calls per program, on each device.
    sent_bytes: what each device sends in all of them, as a ring does it.
  """

  kind: str
  axes: tuple[str, ...]
  group_size: int
  count: float
  sent_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixProducts:
  """Matrix products of one dtype and precision, per device.

  Attributes:
    dtype: of the operands, such as 'bf16'.
    precision: 'default', 'high' or 'highest'.
    flops: of one pass; a multiplication and an addition are two.
    moved_bytes: operands and results, of those outside of loops whose number
      of rounds is not known: what is inside is taken to stay on the chip.
  """

  dtype: str
  precision: str
  flops: float
  moved_bytes: float


@dataclasses.dataclass(frozen=True)
class Costs:
  """Of one program on one device.

  Attributes:
    collectives: by descending `sent_bytes`.
    products: by descending `flops`.
  """

  collectives: tuple[Collective, ...]
  products: tuple[MatrixProducts, ...]

  @property
  def flops(self) -> float:
    """Of all matrix products."""
    return sum(x.flops for x in self.products)

  @property
  def sent_bytes(self) -> float:
    """Of all collectives."""
    return sum(x.sent_bytes for x in self.collectives)


@dataclasses.dataclass(frozen=True)
class _Instruction:
  """One line.

  Attributes:
    name: within its computation.
    type: of the result, as text.
    opcode: such as 'dot'.
    rest: operands and attributes, as text.
    is_root: whether the computation returns it.
  """

  name: str
  type: str
  opcode: str
  rest: str
  is_root: bool


_Computations = Mapping[str, Sequence[_Instruction]]


def costs(
  text: str, mesh_shape: Mapping[str, int], *, unknown_trips: float
) -> Costs:
  """Reads the text of a module.

  Args:
    text: HLO, as `lowered.as_text(dialect='hlo')` or `compiled.as_text()`
      give it.
    mesh_shape: sizes by axis name, outermost first; devices are numbered in
      that order.
    unknown_trips: rounds of a loop whose bound is data.

  Raises:
    ValueError: it is something else, such as StableHLO.
  """
  computations, entry = _parse(text)
  collectives: dict[tuple[str, tuple[str, ...], int], list[float]] = {}
  products: dict[tuple[str, str], list[float]] = {}
  for visit in _visits(computations, entry, unknown_trips):
    types = {i.name: i.type for i in computations[visit.name]}
    for instruction in computations[visit.name]:
      kind = instruction.opcode.removesuffix('-start')
      if kind in _KINDS:
        axes, size = _group(instruction, mesh_shape)
        sent = _sent_bytes(kind, instruction, size)
        if visit.name.startswith(_FUSED_SCATTER) and kind == 'all-reduce':
          kind, sent = 'reduce-scatter', sent / 2
        if size > 1:
          total = collectives.setdefault((kind, axes, size), [0.0, 0.0])
          total[0] += visit.count
          total[1] += visit.count * sent
      elif kind == 'dot':
        dtype, precision, flops, moved = _product(instruction, types)
        total = products.setdefault((dtype, precision), [0.0, 0.0])
        total[0] += visit.count * flops
        total[1] += visit.count * moved * visit.is_known
  return Costs(
    tuple(
      sorted(
        (
          Collective(
            kind=kind, axes=axes, group_size=size, count=count, sent_bytes=sent
          )
          for (kind, axes, size), (count, sent) in collectives.items()
        ),
        key=lambda x: -x.sent_bytes,
      )
    ),
    tuple(
      sorted(
        (
          MatrixProducts(
            dtype=dtype, precision=precision, flops=flops, moved_bytes=moved
          )
          for (dtype, precision), (flops, moved) in products.items()
        ),
        key=lambda x: -x.flops,
      )
    ),
  )


def _parse(text: str) -> tuple[_Computations, str]:
  """(instructions by computation, the name of the entry)."""
  computations: dict[str, list[_Instruction]] = {}
  entry = ''
  current: list[_Instruction] = []
  for line in text.splitlines():
    if line.endswith('{') and not line.startswith((' ', 'HloModule')):
      match = _COMPUTATION.match(line)
      if not match:
        raise ValueError(f'text must be HLO, and holds {line[:80]!r}')
      current = computations.setdefault(match[2], [])
      if match[1]:
        entry = match[2]
    elif match := _INSTRUCTION.match(line):
      current.append(_instruction(match))
  if not entry:
    raise ValueError('text must be HLO with an ENTRY computation')
  return computations, entry


def _instruction(match: re.Match[str]) -> _Instruction:
  type_end = _type_end(match[3])
  after = match[3][type_end:]
  opcode = _OPCODE.match(after)
  return _Instruction(
    match[2],
    match[3][:type_end],
    opcode[1] if opcode else '',
    after[opcode.end() :] if opcode else after,
    bool(match[1]),
  )


def _type_end(text: str) -> int:
  """Where the type ends that `text` begins with; a tuple has brackets."""
  if not text.startswith('('):
    return text.find(' ')
  depth = 0
  for i, character in enumerate(text):
    depth += (character == '(') - (character == ')')
    if not depth:
      return i + 1
  raise ValueError(f'unbalanced type in {text[:80]!r}')


@dataclasses.dataclass(frozen=True)
class _Visit:
  """A computation and how often it is run from one place.

  Attributes:
    name: of the computation.
    count: times per program.
    is_known: whether no loop around it has an unknown number of rounds.
  """

  name: str
  count: float
  is_known: bool


def _visits(
  computations: _Computations, entry: str, unknown_trips: float
) -> Iterator[_Visit]:
  """The entry and all that it calls, once for each place it is called from."""
  todo = [_Visit(entry, 1.0, True)]
  while todo:
    visit = todo.pop()
    yield visit
    for instruction in computations[visit.name]:
      count, is_known = visit.count, visit.is_known
      if instruction.opcode == 'while':
        trips = _trips(instruction, computations)
        count *= unknown_trips if trips is None else trips
        is_known &= trips is not None
      for one, several in _CALLED.findall(instruction.rest):
        for name in [one] if one else several.split(','):
          name = name.strip().removeprefix('%')
          if name in computations:
            todo.append(_Visit(name, count, is_known))


def _trips(loop: _Instruction, computations: _Computations) -> int | None:
  """Rounds of a loop from 0 to a constant; None for others."""
  if known := _KNOWN_TRIPS.search(loop.rest):
    return int(known[1])
  condition = re.search(r'\bcondition=%?([^\s,)]+)', loop.rest)
  instructions = computations[condition[1]] if condition else ()
  constants = {
    i.name: i.rest.partition(')')[0]
    for i in instructions
    if i.opcode == 'constant'
  }
  for i in instructions:
    if i.is_root and i.opcode == 'compare' and 'direction=LT' in i.rest:
      bound = _operands(i)[1]
      return int(constants[bound]) if bound in constants else None
  return None


def _operands(instruction: _Instruction) -> list[str]:
  """Names; text of some stages repeats the types in front of them."""
  end = _type_end('(' + instruction.rest) - 2
  inside = re.sub(r'[\[{][^\]}]*[\]}]', '', instruction.rest[:end])
  return [x.split()[-1].removeprefix('%') for x in inside.split(',') if x]


def _shapes(type_: str) -> list[tuple[str, list[int]]]:
  return [
    (dtype, [int(d) for d in dims.split(',') if d])
    for dtype, dims in _ARRAY.findall(type_)
    if dtype in _DTYPE_BYTES
  ]


def _num_bytes(shape: tuple[str, list[int]]) -> int:
  return _DTYPE_BYTES[shape[0]] * math.prod(shape[1])


def _sent_bytes(kind: str, instruction: _Instruction, size: int) -> float:
  """What one device sends in one call when the group forms a ring."""
  shapes = _shapes(instruction.type)
  if kind == 'collective-permute':
    return _num_bytes(shapes[0])
  if instruction.opcode == 'all-gather-start':  # (operands, results)
    shapes = shapes[len(shapes) // 2 :]
  result = sum(map(_num_bytes, shapes))
  if kind == 'reduce-scatter':
    return result * (size - 1)
  passes = 2 if kind == 'all-reduce' else 1
  return passes * result * (size - 1) / size


def _product(
  instruction: _Instruction, types: Mapping[str, str]
) -> tuple[str, str, float, float]:
  """(dtype, precision, flops, bytes) of one product."""
  (result,) = _shapes(instruction.type)
  operands = [_shapes(types[name])[0] for name in _operands(instruction)[:2]]
  contracting = re.search(
    r'lhs_contracting_dims=\{([\d,]*)\}', instruction.rest
  )
  assert contracting, instruction.rest
  sizes = [operands[0][1][int(d)] for d in contracting[1].split(',') if d]
  precision = re.search(r'operand_precision=\{(\w+)', instruction.rest)
  return (
    operands[0][0],
    precision[1] if precision else 'default',
    2.0 * math.prod(result[1]) * math.prod(sizes),
    float(sum(map(_num_bytes, [result, *operands]))),
  )


def _group(
  instruction: _Instruction, mesh_shape: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
  """(axes, devices) of a collective's groups."""
  rest = instruction.rest
  if named := re.search(r'replica_groups=mesh\[[^\]]*\] \{([^}]*)\}', rest):
    axes = re.findall(r"'(\w+)'", named[1])
    axes = [a for a in mesh_shape if a in axes and mesh_shape[a] > 1]
    return tuple(axes), math.prod(mesh_shape[a] for a in axes)
  members = _first_group(rest, math.prod(mesh_shape.values()))
  places = [_place(device, tuple(mesh_shape.values())) for device in members]
  return (
    tuple(
      axis
      for axis, along in zip(mesh_shape, zip(*places))
      if len(set(along)) > 1
    ),
    len(members),
  )


def _first_group(rest: str, num_devices: int) -> list[int]:
  """Devices of the first group, or of the first pair of a permutation."""
  if iota := re.search(
    r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest
  ):
    (_, *sizes), dims, order = (
      [int(x) for x in part.split(',')] if part else []
      for part in iota.groups()
    )
    order = order or list(range(len(dims)))
    turned = [dims[i] for i in order]
    strides = [math.prod(dims[i + 1 :]) for i in order]
    return [
      sum(p * s for p, s in zip(_place(i, tuple(turned)), strides))
      for i in range(math.prod(sizes))
    ]
  listed = re.search(
    r'(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}', rest
  )
  if not listed:  # All devices.
    return list(range(num_devices))
  return [int(x) for x in listed[1].split(',')]


def _place(index: int, dims: tuple[int, ...]) -> tuple[int, ...]:
  """Where the index-th element of an array lies."""
  place = []
  for size in reversed(dims):
    place.append(index % size)
    index //= size
  return tuple(reversed(place))
