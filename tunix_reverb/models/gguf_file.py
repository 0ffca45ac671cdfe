"""GGUF files: llama.cpp's, quantised or not, of the same three families.

Tensors are decoded a block of rows at a time, so that a file of 4 bits per
param never needs more memory than the params it becomes. llama.cpp turns pairs
of neighbouring features in models of family llama and has therefore reordered
the rows of their query and key projections; here they are put back.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
import re
from typing import Any

import numpy as np

from tunix_reverb import errors
from tunix_reverb.models import source as source_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import rope
from tunix_reverb.text import gguf_metadata

_FAMILIES = ('llama', 'qwen2', 'qwen3')
_ROPE_FACTORS = 'rope_freqs.weight'
_ROWS_AT_A_TIME = 4096
# Names at Hugging Face by GGUF's.
_NAMES = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
}
_LAYER_NAMES = {
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'attn_q_norm': 'self_attn.q_norm',
  'attn_k_norm': 'self_attn.k_norm',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}


def config(reader: Any, where: str) -> config_lib.TransformerConfig:
  """What the file's metadata describes.

  Args:
    reader: of the file.
    where: named in errors.

  Raises:
    errors.UserError: a family or an option that ours does not compute.
  """
  family = gguf_metadata.field(reader, 'general.architecture')
  if family not in _FAMILIES:
    raise errors.UserError(
      f'{where}: general.architecture ({family!r}) must be one of '
      f'{", ".join(_FAMILIES)}'
    )
  get = lambda name, default=None: gguf_metadata.field(
    reader, f'{family}.{name}', default
  )
  tensors = {t.name: t for t in reader.tensors}
  try:
    heads = int(get('attention.head_count'))
    size = int(get('embedding_length'))
    found = config_lib.TransformerConfig(
      vocabulary_size=int(tensors['token_embd.weight'].shape[1]),
      num_layers=int(get('block_count')),
      model_size=size,
      mlp_size=int(get('feed_forward_length')),
      num_heads=heads,
      num_kv_heads=int(get('attention.head_count_kv', heads)),
      head_size=int(get('attention.key_length', size // heads)),
      rope_theta=float(get('rope.freq_base', 10_000.0)),
      norm_epsilon=round(float(get('attention.layer_norm_rms_epsilon')), 12),
      qk_norm=family == 'qwen3',
      qkv_bias=family == 'qwen2',
      tied_embeddings='output.weight' not in tensors,
    )
  except (KeyError, TypeError, ValueError) as e:
    raise errors.UserError(f'{where}: metadata lack or spoil {e}') from e
  if get('rope.scaling.type', 'none') != 'none':
    raise errors.UserError(
      f'{where}: rope.scaling.type ({get("rope.scaling.type")!r}) must be none'
    )
  if _ROPE_FACTORS in tensors:
    return with_scaling(found, tensors[_ROPE_FACTORS].data, where)
  return found


def description(reader: Any) -> dict[str, Any]:
  """What config.json says beside the sizes, as far as the file does."""
  family = gguf_metadata.field(reader, 'general.architecture')
  fields = {
    'max_position_embeddings': f'{family}.context_length',
    'bos_token_id': 'tokenizer.ggml.bos_token_id',
    'eos_token_id': 'tokenizer.ggml.eos_token_id',
    'pad_token_id': 'tokenizer.ggml.padding_token_id',
  }
  found = {
    key: gguf_metadata.field(reader, name) for key, name in fields.items()
  }
  return {key: int(value) for key, value in found.items() if value is not None}


class GgufSource(source_lib.TensorSource):
  """The tensors of one file, by their names at Hugging Face."""

  def __init__(self, reader: Any, model: config_lib.TransformerConfig):
    """Reads nothing yet.

    Args:
      reader: of the file.
      model: what it holds, see `config`.
    """
    from gguf import quants

    self._dequantise = quants.dequantize
    self._model = model
    self._is_reordered = (
      gguf_metadata.field(reader, 'general.architecture') == 'llama'
    )
    self._tensors = {
      _hugging_face_name(tensor.name): tensor
      for tensor in reader.tensors
      if tensor.name != _ROPE_FACTORS
    }

  def names(self) -> Iterable[str]:
    return self._tensors.keys()

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(self._tensors[name].shape))

  def read(self, name: str, index: source_lib.Index) -> np.ndarray:
    tensor = self._tensors[name]
    decode = functools.partial(self._dequantise, qtype=tensor.tensor_type)
    if len(index) == 1:
      return decode(tensor.data)[index]
    rows = self._rows(name)[index[0]]
    result = np.empty((rows.size, index[1].stop - index[1].start), np.float32)
    for start in range(0, rows.size, _ROWS_AT_A_TIME):
      block = slice(start, start + _ROWS_AT_A_TIME)
      result[block] = decode(tensor.data[rows[block]])[:, index[1]]
    return result

  def _rows(self, name: str) -> np.ndarray:
    """Where each row of a matrix stands in the file."""
    rows = np.arange(self.shape(name)[0])
    if self._is_reordered and ('q_proj' in name or 'k_proj' in name):
      # Within a head: feature 2 j + s of the file is s d / 2 + j here.
      pairs = rows.reshape(-1, self._model.head_size // 2, 2)
      return pairs.swapaxes(1, 2).reshape(-1)
    return rows


def _hugging_face_name(name: str) -> str:
  match = re.fullmatch(r'blk\.(\d+)\.(\w+)\.(weight|bias)', name)
  if match and match[2] in _LAYER_NAMES:
    return f'model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}'
  stem, _, kind = name.rpartition('.')
  return f'{_NAMES[stem]}.{kind}' if stem in _NAMES else name


def with_scaling(
  found: config_lib.TransformerConfig, factors: np.ndarray, where: str
) -> config_lib.TransformerConfig:
  """With the Llama 3.1 scaling whose effect the file holds, f32 [d / 2]."""
  scaled = dataclasses.replace(
    found, rope_scaling=config_lib.RopeScaling(factor=float(factors.max()))
  )
  expected = rope.frequencies(found) / rope.frequencies(scaled)
  if not np.allclose(expected, factors, rtol=1e-4):
    raise errors.UserError(
      f"{where}: {_ROPE_FACTORS} is not Llama 3.1's scaling of rotary "
      'wavelengths, the only one that there is here'
    )
  return scaled
