"""Which tensors of a checkpoint a transformer's params are made of.

Ours are stacked over the layers and stand as [inputs, outputs]; a checkpoint of
Hugging Face has a tensor for each layer, as [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses

import numpy as np

from tunix_reverb import types
from tunix_reverb.models import source as source_lib
from tunix_reverb.networks.transformer import config as config_lib

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where one param comes from.

  Attributes:
    names: of the tensors; of a stacked param one for each layer.
    is_stacked: whether the param's first dim goes over them.
    is_transposed: whether the tensors' two dims are the other way round.
  """

  names: tuple[str, ...]
  is_stacked: bool = False
  is_transposed: bool = False

  def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of each tensor, from the param's."""
    own = shape[1:] if self.is_stacked else shape
    return own[::-1] if self.is_transposed else own

  def read(
    self, source: source_lib.TensorSource, index: source_lib.Index
  ) -> np.ndarray:
    """A part of the param, f32.

    Args:
      source: has the tensors.
      index: a slice with bounds for each dim of the param.
    """
    own = index[1:] if self.is_stacked else index
    names = self.names[index[0]] if self.is_stacked else self.names
    shape = [s.stop - s.start for s in index]
    result = np.empty(shape, np.float32)
    parts = result if self.is_stacked else [result]
    for part, name in zip(parts, names):
      tensor = source.read(name, own[::-1] if self.is_transposed else own)
      part[...] = tensor.T if self.is_transposed else tensor
    return result


_MATRICES = {
  'query': 'self_attn.q_proj.weight',
  'key': 'self_attn.k_proj.weight',
  'value': 'self_attn.v_proj.weight',
  'output': 'self_attn.o_proj.weight',
  'gate': 'mlp.gate_proj.weight',
  'up': 'mlp.up_proj.weight',
  'down': 'mlp.down_proj.weight',
}
_VECTORS = {
  'attention_norm': 'input_layernorm.weight',
  'mlp_norm': 'post_attention_layernorm.weight',
}
_BIASES = {
  'query_bias': 'self_attn.q_proj.bias',
  'key_bias': 'self_attn.k_proj.bias',
  'value_bias': 'self_attn.v_proj.bias',
}
_HEAD_NORMS = {
  'query_norm': 'self_attn.q_norm.weight',
  'key_norm': 'self_attn.k_norm.weight',
}


def origins(config: config_lib.TransformerConfig) -> dict[Path, Origin]:
  """Of every param that a language model has; a value head is our own."""
  vectors = dict(_VECTORS)
  if config.qkv_bias:
    vectors |= _BIASES
  if config.qk_norm:
    vectors |= _HEAD_NORMS
  found: dict[Path, Origin] = {
    ('embedding',): Origin(('model.embed_tokens.weight',)),
    ('final_norm',): Origin(('model.norm.weight',)),
  }
  if not config.tied_embeddings:
    found['head',] = Origin(('lm_head.weight',))
  for is_transposed, names in ((True, _MATRICES), (False, vectors)):
    for param, name in names.items():
      found['layers', param] = Origin(
        tuple(f'model.layers.{i}.{name}' for i in range(config.num_layers)),
        is_stacked=True,
        is_transposed=is_transposed,
      )
  return found


def flatten(tree: types.Nest, prefix: Path = ()) -> dict[Path, types.Nest]:
  """The leaves of nested dicts, by path."""
  if not isinstance(tree, Mapping):
    return {prefix: tree}
  return {
    path: leaf
    for key in tree
    for path, leaf in flatten(tree[key], (*prefix, key)).items()
  }


def unflatten(leaves: Mapping[Path, types.Nest]) -> types.Nest:
  """The inverse of `flatten`."""
  tree: dict = {}
  for path, leaf in leaves.items():
    branch = tree
    for key in path[:-1]:
      branch = branch.setdefault(key, {})
    branch[path[-1]] = leaf
  return tree


# Reads a part of one param: index -> f32 array.
Reader = Callable[[source_lib.Index], np.ndarray]
