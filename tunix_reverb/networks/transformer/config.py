"""What a transformer is, and how it is computed; neither needs JAX.

`TransformerConfig` fixes the params: two runs with equal ones can exchange
checkpoints. `ComputeConfig` changes speed, memory and rounding only.
"""

from __future__ import annotations

import dataclasses

COMPUTE_DTYPES = ('bfloat16', 'float32')
ATTENTION_KINDS = ('auto', 'splash', 'cudnn', 'blocked', 'reference')
REMAT_POLICIES = ('layer', 'attention', 'dots', 'none')
PRECISIONS = ('default', 'high', 'highest')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """Llama 3.1's stretch of the rotary wavelengths to a longer context.

  Attributes:
    factor: how much longer the context becomes.
    low_frequency_factor: wavelengths above original_length / this are
      stretched by `factor`.
    high_frequency_factor: those below original_length / this stay.
    original_length: positions that the model was first trained on.
  """

  factor: float
  low_frequency_factor: float = 1.0
  high_frequency_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self) -> None:
    if self.factor < 1:
      raise ValueError(f'factor ({self.factor}) must be at least 1')
    if not 0 < self.low_frequency_factor < self.high_frequency_factor:
      raise ValueError(
        f'low_frequency_factor ({self.low_frequency_factor}) must be above 0 '
        f'and below high_frequency_factor ({self.high_frequency_factor})'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """A decoder-only transformer of the Llama and Qwen families.

  Pre-norm blocks of grouped-query attention with rotary positions and of a
  SwiGLU MLP, no biases except `qkv_bias`, a policy head over the vocabulary
  and a linear value head.

  Attributes:
    vocabulary_size: V, tokens.
    num_layers: N.
    model_size: D, features between blocks.
    mlp_size: F, features inside the MLP.
    num_heads: H, query heads.
    num_kv_heads: K, key and value heads; divides H.
    head_size: d, features of a head, even.
    rope_theta: base of the rotary wavelengths.
    rope_scaling: Llama 3.1's, or None.
    norm_epsilon: RMSNorm's.
    qk_norm: RMSNorm over each head of queries and keys (Qwen3).
    qkv_bias: biases of the query, key and value projections (Qwen2).
    tied_embeddings: the policy head is the embedding, transposed.
    init_scale: standard deviation of fresh matrices.
    value_trunk: values come from an embedding and layers of their own, as many
      as the policy's, which actors do without.
  """

  vocabulary_size: int
  num_layers: int
  model_size: int
  mlp_size: int
  num_heads: int
  num_kv_heads: int
  head_size: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_epsilon: float = 1e-5
  qk_norm: bool = False
  qkv_bias: bool = False
  tied_embeddings: bool = False
  init_scale: float = 0.02
  value_trunk: bool = False

  def __post_init__(self) -> None:
    for name in (
      'vocabulary_size',
      'num_layers',
      'model_size',
      'mlp_size',
      'num_heads',
      'num_kv_heads',
      'head_size',
    ):
      value = getattr(self, name)
      if value < 1:
        raise ValueError(f'{name} ({value}) must be at least 1')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads ({self.num_heads}) must be a multiple of num_kv_heads '
        f'({self.num_kv_heads})'
      )
    if self.head_size % 2:
      raise ValueError(
        f'head_size ({self.head_size}) must be even: rotary positions turn '
        'pairs of features'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeConfig:
  """How the model is computed.

  Attributes:
    dtype: of params and activations inside the blocks, 'bfloat16' or
      'float32'. Master params, norms, softmaxes and both heads are float32.
    remat: what the forward pass keeps for the backward pass, from the least
      memory to the most: 'layer' keeps each layer's input; 'attention' also
      the output of attention, so that only it is not computed twice; 'dots'
      also the products of matrices; 'none' keeps everything but what was
      gathered from other devices.
    attention: which implementation; 'auto' takes the fastest that the mesh's
      platform, the dtype and the shapes allow. See `attention.py`.
    attention_block: positions of a block of blocked attention.
    head_precision: of the policy head's matrix products. 'default' is one
      bfloat16 pass on TPU and TF32 on GPU, which is too coarse for importance
      ratios; 'high' is three passes; on CPU all are float32.
    head_block: tokens per device whose logits exist at one time.
  """

  dtype: str = 'bfloat16'
  remat: str = 'attention'
  attention: str = 'auto'
  attention_block: int = 512
  head_precision: str = 'high'
  head_block: int = 512

  def __post_init__(self) -> None:
    for name, options in (
      ('dtype', COMPUTE_DTYPES),
      ('remat', REMAT_POLICIES),
      ('attention', ATTENTION_KINDS),
      ('head_precision', PRECISIONS),
    ):
      value = getattr(self, name)
      if value not in options:
        raise ValueError(
          f'{name} ({value!r}) must be one of {", ".join(options)}'
        )
    for name in ('attention_block', 'head_block'):
      value = getattr(self, name)
      if value < 1:
        raise ValueError(f'{name} ({value}) must be at least 1')
