"""Named transformers: published sizes of Llama and Qwen, and small ones."""

from __future__ import annotations

import dataclasses

from tunix_reverb.networks.transformer import config as config_lib

_LLAMA2 = config_lib.TransformerConfig(
  vocabulary_size=32_000,
  num_layers=32,
  model_size=4096,
  mlp_size=11_008,
  num_heads=32,
  num_kv_heads=32,
  head_size=128,
)
_LLAMA3 = config_lib.TransformerConfig(
  vocabulary_size=128_256,
  num_layers=32,
  model_size=4096,
  mlp_size=14_336,
  num_heads=32,
  num_kv_heads=8,
  head_size=128,
  rope_theta=500_000.0,
)
_LLAMA31 = dataclasses.replace(
  _LLAMA3, rope_scaling=config_lib.RopeScaling(factor=8.0)
)
_LLAMA32 = dataclasses.replace(
  _LLAMA3,
  rope_scaling=config_lib.RopeScaling(factor=32.0),
  tied_embeddings=True,
)
_QWEN2 = config_lib.TransformerConfig(
  vocabulary_size=152_064,
  num_layers=28,
  model_size=3584,
  mlp_size=18_944,
  num_heads=28,
  num_kv_heads=4,
  head_size=128,
  rope_theta=1_000_000.0,
  norm_epsilon=1e-6,
  qkv_bias=True,
)
_QWEN2_SMALL = dataclasses.replace(
  _QWEN2, vocabulary_size=151_936, tied_embeddings=True
)
_QWEN3 = config_lib.TransformerConfig(
  vocabulary_size=151_936,
  num_layers=36,
  model_size=4096,
  mlp_size=12_288,
  num_heads=32,
  num_kv_heads=8,
  head_size=128,
  rope_theta=1_000_000.0,
  norm_epsilon=1e-6,
  qk_norm=True,
)
_QWEN3_SMALL = dataclasses.replace(_QWEN3, tied_embeddings=True)


def _sized(
  family: config_lib.TransformerConfig,
  num_layers: int,
  model_size: int,
  mlp_size: int,
  num_heads: int,
  num_kv_heads: int,
  head_size: int = 128,
) -> config_lib.TransformerConfig:
  return dataclasses.replace(
    family,
    num_layers=num_layers,
    model_size=model_size,
    mlp_size=mlp_size,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_size=head_size,
  )


PRESETS: dict[str, config_lib.TransformerConfig] = {
  # About 0.1 million params: tests and the first run on a laptop.
  'tiny': config_lib.TransformerConfig(
    vocabulary_size=256,
    num_layers=2,
    model_size=64,
    mlp_size=192,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    # With 0.02, made for wide models, it learns from scratch half as fast.
    init_scale=0.06,
  ),
  # About 10 million.
  '10m': config_lib.TransformerConfig(
    vocabulary_size=4096,
    num_layers=10,
    model_size=256,
    mlp_size=768,
    num_heads=8,
    num_kv_heads=4,
    head_size=32,
  ),
  'llama2-7b': _LLAMA2,
  'llama2-13b': _sized(_LLAMA2, 40, 5120, 13_824, 40, 40),
  'llama2-70b': _sized(_LLAMA2, 80, 8192, 28_672, 64, 8),
  'llama3-8b': _LLAMA3,
  'llama3-70b': _sized(_LLAMA3, 80, 8192, 28_672, 64, 8),
  'llama3.1-8b': _LLAMA31,
  'llama3.1-70b': _sized(_LLAMA31, 80, 8192, 28_672, 64, 8),
  'llama3.2-1b': _sized(_LLAMA32, 16, 2048, 8192, 32, 8, head_size=64),
  'llama3.2-3b': _sized(_LLAMA32, 28, 3072, 8192, 24, 8),
  'qwen2-0.5b': _sized(_QWEN2_SMALL, 24, 896, 4864, 14, 2, head_size=64),
  'qwen2-1.5b': _sized(_QWEN2_SMALL, 28, 1536, 8960, 12, 2),
  'qwen2-7b': _QWEN2,
  'qwen2-72b': _sized(_QWEN2, 80, 8192, 29_568, 64, 8),
  'qwen3-0.6b': _sized(_QWEN3_SMALL, 28, 1024, 3072, 16, 8),
  'qwen3-1.7b': _sized(_QWEN3_SMALL, 28, 2048, 6144, 16, 8),
  'qwen3-4b': _sized(_QWEN3_SMALL, 36, 2560, 9728, 32, 8),
  'qwen3-8b': _QWEN3,
  'qwen3-14b': _sized(_QWEN3, 40, 5120, 17_408, 40, 8),
  'qwen3-32b': _sized(_QWEN3, 64, 5120, 25_600, 64, 8),
}


def get(name: str) -> config_lib.TransformerConfig:
  """The preset `name`.

  Raises:
    ValueError: there is none of that name.
  """
  if name not in PRESETS:
    raise ValueError(
      f'model ({name!r}) must be one of {", ".join(sorted(PRESETS))}'
    )
  return PRESETS[name]
