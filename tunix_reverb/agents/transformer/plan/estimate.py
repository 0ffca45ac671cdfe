"""Closed forms for memory and time: to choose among meshes, not to promise.

They rank hundreds of meshes in no time; what a plan prints of the one that is
chosen comes from the compiled program. Letters as in `networks.transformer`.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from tunix_reverb.agents.transformer.plan import settings as settings_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.sharding import chips
from tunix_reverb.sharding import mesh as mesh_lib

_F32 = 4
# Of a vector register. Params in shards narrower than that are not gathered by
# the TPU compiler but added up, which sends twice as much (libtpu 0.0.50).
_LANES = 128
# A virtual device has no figures; its meshes are ranked by this chip's.
_STAND_IN = 'v5e'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """Of one update on one device.

  Attributes:
    params_bytes: this device's shards, float32; Adam has twice as much.
    temporary_bytes: gradients, activations and what is gathered.
    step_s: products at the chip's peak and transfers, one after the other.
  """

  params_bytes: float
  temporary_bytes: float
  step_s: float

  @property
  def total_bytes(self) -> float:
    """With params and optimiser state."""
    return 3 * self.params_bytes + self.temporary_bytes


def estimate(settings: settings_lib.Settings) -> Estimate:
  """The closed forms for `settings`."""
  params_bytes = params_bytes_per_device(settings.model, settings.mesh)
  return Estimate(
    params_bytes=params_bytes,
    temporary_bytes=_temporary_bytes(settings, params_bytes),
    step_s=_product_s(settings) + _transfer_s(settings, params_bytes),
  )


def model_flops(
  model: config_lib.TransformerConfig, num_tokens: int, row_length: int
) -> float:
  """Of one update, all devices, without what is computed twice.

  6 for each param of a matrix and token (Kaplan et al. 2020), and attention to
  the positions before, half of a row on average, for rows of one segment.
  """
  attention = (
    12 * model.num_layers * model.num_heads * model.head_size * row_length / 2
  )
  return num_tokens * (6.0 * num_matrix_params(model) + attention)


def num_matrix_params(model: config_lib.TransformerConfig) -> int:
  """Params that each token is multiplied by: the embedding is looked up."""
  return model.num_layers * _layer_params(model) + (
    model.vocabulary_size * model.model_size
  )


def params_bytes_per_device(
  model: config_lib.TransformerConfig, mesh: settings_lib.MeshSizes
) -> float:
  """float32 params that a device keeps."""
  sizes = mesh._asdict()
  is_spec = lambda x: isinstance(x, mesh_lib.PartitionSpec)
  leaves = jax.tree_util.tree_leaves(params_lib.shapes(model))
  specs = jax.tree_util.tree_leaves(params_lib.specs(model), is_leaf=is_spec)
  return sum(
    _F32
    * math.prod(leaf.shape)
    / math.prod(sizes[axis] for axis in mesh_lib.axes_of(spec))
    for leaf, spec in zip(leaves, specs)
  )


def _layer_params(model: config_lib.TransformerConfig) -> int:
  """Of the matrices of one layer."""
  heads = 2 * model.num_heads + 2 * model.num_kv_heads
  return model.model_size * (heads * model.head_size + 3 * model.mlp_size)


def _compute_bytes(settings: settings_lib.Settings) -> int:
  return 2 if settings.compute.dtype == 'bfloat16' else _F32


def _temporary_bytes(
  settings: settings_lib.Settings, params_bytes: float
) -> float:
  model, mesh = settings.model, settings.mesh
  size = _compute_bytes(settings)
  shard = settings.micro_batch_rows * settings.row_length / mesh.sequence
  own = shard / mesh.tensor
  vocabulary = model.vocabulary_size * model.model_size / mesh.tensor
  f = model.mlp_size / mesh.tensor
  gradients = params_bytes * (1 if settings.num_micro_batches == 1 else 2)
  # Gathered layers and both embeddings, with their gradients.
  gathered = 2 * (
    size * _layer_params(model) / mesh.tensor + (size + _F32) * vocabulary
  )
  block = min(settings.compute.head_block, own)
  logits = 3 * _F32 * block * model.vocabulary_size
  workspace = _F32 * shard * (2 * model.model_size + 3 * f)
  kept = model.num_layers * _kept_bytes_per_layer(settings, shard, own)
  return gradients + gathered + kept + max(logits, workspace)


def _kept_bytes_per_layer(
  settings: settings_lib.Settings, shard: float, own: float
) -> float:
  """What the forward pass leaves for the backward pass."""
  model, mesh = settings.model, settings.mesh
  size = _compute_bytes(settings)
  heads = shard * model.num_heads / mesh.tensor
  kept = size * own * model.model_size
  remat = settings.compute.remat
  if remat != 'layer':
    kept += heads * (size * model.head_size + _F32)
  if remat in ('dots', 'none'):
    kv_heads = 2 * shard * model.num_kv_heads / mesh.tensor
    products = (heads + kv_heads) * model.head_size
    products += 2 * shard * (model.mlp_size / mesh.tensor + model.model_size)
    # Without any policy, norms and activation functions stay, too.
    kept += size * products * (1 if remat == 'dots' else 3)
  return kept


def _chip(settings: settings_lib.Settings) -> chips.Chip:
  return settings.topology.chip or chips.get(_STAND_IN)


def _product_s(settings: settings_lib.Settings) -> float:
  flops = model_flops(settings.model, settings.num_tokens, settings.row_length)
  return flops / settings.mesh.num_devices / _chip(settings).flops_per_s


def _transfer_s(settings: settings_lib.Settings, params_bytes: float) -> float:
  model, mesh = settings.model, settings.mesh
  size = _compute_bytes(settings)
  shard = settings.micro_batch_rows * settings.row_length / mesh.sequence
  split = mesh.fsdp * mesh.sequence
  others = lambda n: (n - 1) / n
  # Params: gathered forward and backward, gradients scattered.
  per_layer = 3 * size * _layer_params(model) / mesh.tensor * others(split)
  if _chip(settings).platform == 'tpu' and model.model_size // split % _LANES:
    per_layer *= 2
  # Positions: two gathers and two scatters forward, as many backward, and the
  # gathers once more.
  per_layer += 10 * size * shard * model.model_size * others(mesh.tensor)
  # Keys and values.
  kv_size = 2 * model.num_kv_heads * model.head_size / mesh.tensor
  per_layer += (
    3 * size * shard * mesh.sequence * kv_size * others(mesh.sequence)
  )
  sent = settings.num_micro_batches * model.num_layers * per_layer
  sent += 2 * params_bytes * others(mesh.data)
  return sent / _chip(settings).link_bytes_per_s
