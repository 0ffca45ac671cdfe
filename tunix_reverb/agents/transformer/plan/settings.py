"""What is planned: a model, where it runs, and the batch it is given.

Loads no JAX, so that a command line can be answered at once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from tunix_reverb import errors
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.sharding import topologies


class MeshSizes(NamedTuple):
  """Devices along each axis of the mesh."""

  data: int
  fsdp: int
  sequence: int
  tensor: int

  @property
  def num_devices(self) -> int:
    """Of the mesh."""
    return math.prod(self)

  @property
  def num_batch_shards(self) -> int:
    """Groups of devices that hold different rows."""
    return self.data * self.fsdp

  def __str__(self) -> str:
    return ' x '.join(f'{axis} {n}' for axis, n in self._asdict().items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """All that decides what the update needs.

  Attributes:
    model_name: of the preset.
    model: what it is.
    compute: how it is computed.
    topology: where.
    mesh: how its devices are arranged.
    row_length: L, positions of a row.
    num_rows: B, of a global batch.
    num_micro_batches: that the rows of a device are split into.
  """

  model_name: str
  model: config_lib.TransformerConfig
  compute: config_lib.ComputeConfig
  topology: topologies.Topology
  mesh: MeshSizes
  row_length: int
  num_rows: int
  num_micro_batches: int

  def __post_init__(self) -> None:
    if problem := self.problem():
      raise errors.UserError(problem)

  @property
  def num_tokens(self) -> int:
    """Positions of a global batch, all of them taken to be filled."""
    return self.num_rows * self.row_length

  @property
  def micro_batch_rows(self) -> int:
    """Rows that a device works on at one time."""
    return self.num_rows // self.mesh.num_batch_shards // self.num_micro_batches

  def problem(self) -> str:
    """Why no such update can be made, or ''."""
    mesh, model = self.mesh, self.model
    if mesh.num_devices != self.topology.num_chips or min(mesh) < 1:
      return (
        f'mesh ({mesh}) must multiply to the chips of {self.topology.name} '
        f'({self.topology.num_chips})'
      )
    rows = mesh.num_batch_shards * self.num_micro_batches
    divided = (
      ('vocabulary_size', model.vocabulary_size, 'tensor', mesh.tensor),
      ('num_heads', model.num_heads, 'tensor', mesh.tensor),
      ('num_kv_heads', model.num_kv_heads, 'tensor', mesh.tensor),
      ('mlp_size', model.mlp_size, 'tensor', mesh.tensor),
      (
        'model_size',
        model.model_size,
        'fsdp x sequence',
        mesh.fsdp * mesh.sequence,
      ),
      (
        'row_length',
        self.row_length,
        'sequence x tensor',
        mesh.sequence * mesh.tensor,
      ),
      ('rows', self.num_rows, 'data x fsdp x micro_batches', rows),
    )
    for name, value, divisor, size in divided:
      if value < 1 or value % size:
        return f'{name} ({value}) must be a multiple of {divisor} ({size})'
    return ''
