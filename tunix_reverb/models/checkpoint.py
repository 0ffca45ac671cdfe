"""Pretrained models: a directory of Hugging Face's, or a GGUF file.

  model = checkpoint.open_checkpoint(path)
  params = model.load(mesh, key=key)     # global arrays, each device its shards

Nothing is read when a checkpoint is opened but its description. `load` reads
the shards of one param after the other: of a param that has reached its devices
the host keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.models import gguf_file
from tunix_reverb.models import huggingface_config
from tunix_reverb.models import layout
from tunix_reverb.models import safetensors_file
from tunix_reverb.models import source as source_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.sharding import shards
from tunix_reverb.text import gguf_metadata

CONFIG_NAME = 'config.json'
# Params that no language model has, such as the value head, by their path.
EXTRAS_NAME = 'tunix_reverb.safetensors'
GGUF_SUFFIX = '.gguf'
# Tensors that some checkpoints hold beside the model's.
_NO_PARAMS = ('rotary_emb.inv_freq',)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A pretrained model whose numbers are still on disk.

  Attributes:
    path: of the directory or file.
    config: what the model is.
    source: its tensors.
    extras: params that are our own, by their path; fresh ones where absent.
    description: what config.json says of it, or would say beside the sizes.
  """

  path: pathlib.Path
  config: config_lib.TransformerConfig
  source: source_lib.TensorSource
  extras: source_lib.TensorSource
  description: Mapping[str, Any]

  def load(self, mesh: jax.sharding.Mesh, *, key: jax.Array) -> types.Nest:
    """The params, f32, as global arrays that are split over the mesh.

    Args:
      mesh: where they go.
      key: PRNG key of those that the checkpoint lacks.

    Raises:
      errors.UserError: a tensor is absent, of another shape or unknown.
    """
    shapes = layout.flatten(params_lib.shapes(self.config))
    specs = layout.flatten(params_lib.specs(self.config))
    readers = self._readers(shapes)
    return layout.unflatten(
      {
        path: (
          _place(readers[path], x.shape, mesh, specs[path])
          if path in readers
          else _fresh(self.config, path, mesh, specs[path], key)
        )
        for path, x in shapes.items()
      }
    )

  def _readers(self, shapes: Mapping[layout.Path, Any]) -> dict:
    """`layout.Reader` of every param that is on disk, by path.

    Raises:
      errors.UserError: see `load`.
    """
    readers: dict[layout.Path, layout.Reader] = {}
    known = set()
    for path, origin in layout.origins(self.config).items():
      wanted = origin.shape(shapes[path].shape)
      for name in origin.names:
        self._check(self.source, name, wanted)
      known |= set(origin.names)
      readers[path] = functools.partial(origin.read, self.source)
    self._check_rest(set(self.source.names()) - known)
    for name in self.extras.names():
      path = tuple(name.split('.'))
      if path in shapes:
        self._check(self.extras, name, shapes[path].shape)
        readers[path] = functools.partial(_read_extra, self.extras, name)
    return readers

  def _check(
    self, source: source_lib.TensorSource, name: str, wanted: tuple[int, ...]
  ) -> None:
    if name not in source.names():
      raise errors.UserError(f'model ({self.path}) must hold the tensor {name}')
    if source.shape(name) != wanted:
      raise errors.UserError(
        f'model ({self.path}): the shape of {name} ({source.shape(name)}) must '
        f'be {wanted}, by its description'
      )

  def _check_rest(self, names: set[str]) -> None:
    """Refuses tensors that the model would have to be computed with."""
    rest = {name for name in names if not name.endswith(_NO_PARAMS)}
    if self.config.tied_embeddings:
      rest -= {'lm_head.weight'}
    if rest:
      raise errors.UserError(
        f'model ({self.path}) holds tensors that its family does not have, '
        f'such as {", ".join(sorted(rest)[:3])}'
      )


def open_checkpoint(name: str) -> Checkpoint:
  """Reads what a checkpoint holds, and none of its numbers.

  Args:
    name: path of a directory with config.json and safetensors, or of a file
      whose name ends in .gguf.

  Raises:
    errors.UserError: it cannot be read, or is none of a known family.
  """
  path = pathlib.Path(name)
  nothing = safetensors_file.SafetensorsSource([])
  if path.is_file() and path.suffix == GGUF_SUFFIX:
    reader = gguf_metadata.open_reader(path)
    config = gguf_file.config(reader, name)
    source = gguf_file.GgufSource(reader, config)
    description = gguf_file.description(reader)
    return Checkpoint(path, config, source, nothing, description)
  description = read_json(path / CONFIG_NAME)
  extras = path / EXTRAS_NAME
  return Checkpoint(
    path,
    huggingface_config.parse(description, name),
    safetensors_file.SafetensorsSource(safetensors_file.find(path)),
    safetensors_file.SafetensorsSource([extras] if extras.exists() else []),
    description,
  )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object from a file of a checkpoint.

  Raises:
    errors.UserError: there is no such file, or it is something else.
  """
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as e:
    raise errors.UserError(
      f'model ({path.parent}) must be a directory with a readable {path.name}, '
      f'or a file that ends in {GGUF_SUFFIX}: {e}'
    ) from e
  if not isinstance(values, dict):
    raise errors.UserError(f'{path} must hold a JSON object')
  return values


def _read_extra(
  source: source_lib.TensorSource, name: str, index: source_lib.Index
) -> np.ndarray:
  return np.asarray(source.read(name, index), np.float32)


def _place(
  read: layout.Reader,
  shape: tuple[int, ...],
  mesh: jax.sharding.Mesh,
  spec: mesh_lib.PartitionSpec,
) -> jax.Array:
  """A global array of which the host holds one shard at a time.

  `jax.make_array_from_callback` would read a shard once for each device that
  holds it, and keep all of them until the last one is read.
  """
  sharding = jax.sharding.NamedSharding(mesh, spec)
  devices: dict[tuple, list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape))
    devices.setdefault(bounds, []).append(device)
  arrays = []
  for bounds, holders in devices.items():
    part = read(tuple(slice(*pair) for pair in bounds))
    for device in holders:
      arrays.append(jax.device_put(part, device))
    jax.block_until_ready(arrays)
  return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _fresh(
  config: config_lib.TransformerConfig,
  path: layout.Path,
  mesh: jax.sharding.Mesh,
  spec: mesh_lib.PartitionSpec,
  key: jax.Array,
) -> jax.Array:
  """One param's first values; the compiler drops the others."""
  init = lambda key: layout.flatten(params_lib.init(config, key))[path]
  return shards.create(init, mesh, spec, key=key)
