"""`config.json` of a Hugging Face checkpoint and our `TransformerConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix_reverb import errors
from tunix_reverb.networks.transformer import config as config_lib

_ARCHITECTURES = {
  'llama': 'LlamaForCausalLM',
  'qwen2': 'Qwen2ForCausalLM',
  'qwen3': 'Qwen3ForCausalLM',
}
_SIZES = (
  'vocab_size',
  'num_hidden_layers',
  'hidden_size',
  'intermediate_size',
  'num_attention_heads',
)
# What `transformers` takes where config.json is silent.
_THETA = 10_000.0
_EPSILON = 1e-6
# Fields that change the model, and the only values that ours computes.
_FIXED = {
  'hidden_act': ('silu',),
  'attention_bias': (False,),
  'mlp_bias': (False,),
  'use_sliding_window': (False,),
  'partial_rotary_factor': (1.0,),
}


def parse(
  values: Mapping[str, Any], where: str
) -> config_lib.TransformerConfig:
  """What a config.json describes.

  Args:
    values: of config.json.
    where: named in errors.

  Raises:
    errors.UserError: a family or an option that ours does not compute, or a
      size is absent or makes no sense.
  """
  family = values.get('model_type')
  if family not in _ARCHITECTURES:
    raise errors.UserError(
      f'{where}: model_type ({family!r}) must be one of '
      f'{", ".join(_ARCHITECTURES)}'
    )
  _check_fixed(values, where)
  rope = dict(values.get('rope_scaling') or values.get('rope_parameters') or {})
  vocabulary, layers, size, mlp_size, heads = (
    _size(values, name, where) for name in _SIZES
  )
  try:
    return config_lib.TransformerConfig(
      vocabulary_size=vocabulary,
      num_layers=layers,
      model_size=size,
      mlp_size=mlp_size,
      num_heads=heads,
      num_kv_heads=values.get('num_key_value_heads') or heads,
      head_size=values.get('head_dim') or size // heads,
      rope_theta=float(
        values.get('rope_theta') or rope.get('rope_theta') or _THETA
      ),
      rope_scaling=_rope_scaling(rope, where),
      norm_epsilon=values.get('rms_norm_eps', _EPSILON),
      qk_norm=family == 'qwen3',
      qkv_bias=family == 'qwen2',
      tied_embeddings=bool(values.get('tie_word_embeddings', False)),
    )
  except (KeyError, TypeError, ValueError) as e:
    if isinstance(e, errors.UserError):
      raise
    raise errors.UserError(f'{where}: a field is absent or wrong: {e}') from e


def dump(config: config_lib.TransformerConfig, *, dtype: str) -> dict[str, Any]:
  """config.json of a model, as `transformers` reads it.

  Args:
    config: of the model.
    dtype: of the tensors that are saved, such as 'float32'.

  Raises:
    errors.UserError: no family of `transformers` has its options.
  """
  if config.qk_norm and config.qkv_bias:
    raise errors.UserError(
      'a model with qk_norm and qkv_bias cannot be saved: Qwen3 has the first, '
      'Qwen2 the second, and no family both'
    )
  family = (
    'qwen3' if config.qk_norm else 'qwen2' if config.qkv_bias else 'llama'
  )
  values: dict[str, Any] = {
    'architectures': [_ARCHITECTURES[family]],
    'model_type': family,
    'vocab_size': config.vocabulary_size,
    'num_hidden_layers': config.num_layers,
    'hidden_size': config.model_size,
    'intermediate_size': config.mlp_size,
    'num_attention_heads': config.num_heads,
    'num_key_value_heads': config.num_kv_heads,
    'head_dim': config.head_size,
    'rope_theta': config.rope_theta,
    'rope_scaling': None,
    'rms_norm_eps': config.norm_epsilon,
    'tie_word_embeddings': config.tied_embeddings,
    'hidden_act': 'silu',
    'torch_dtype': dtype,
  }
  scaling = config.rope_scaling
  if scaling is not None:
    values['rope_scaling'] = {
      'rope_type': 'llama3',
      'factor': scaling.factor,
      'low_freq_factor': scaling.low_frequency_factor,
      'high_freq_factor': scaling.high_frequency_factor,
      'original_max_position_embeddings': scaling.original_length,
    }
  return values


def _size(values: Mapping[str, Any], name: str, where: str) -> int:
  value = values.get(name)
  if not isinstance(value, int) or value < 1:
    raise errors.UserError(
      f'{where}: {name} ({value!r}) must be a number of at least 1'
    )
  return value


def _check_fixed(values: Mapping[str, Any], where: str) -> None:
  for name, options in _FIXED.items():
    if values.get(name) is not None and values[name] not in options:
      raise errors.UserError(
        f'{where}: {name} ({values[name]!r}) must be '
        f'{" or ".join(map(repr, options))}'
      )


def _rope_scaling(
  rope: Mapping[str, Any], where: str
) -> config_lib.RopeScaling | None:
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind == 'default':
    return None
  if kind != 'llama3':
    raise errors.UserError(
      f'{where}: rope_type ({kind!r}) must be default or llama3'
    )
  return config_lib.RopeScaling(
    factor=rope['factor'],
    low_frequency_factor=rope['low_freq_factor'],
    high_frequency_factor=rope['high_freq_factor'],
    original_length=rope['original_max_position_embeddings'],
  )
