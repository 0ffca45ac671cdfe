"""Rotary position embeddings (Su et al. 2021), with Llama 3.1's scaling.

Feature i of a head is paired with feature i + d / 2, as in the checkpoints of
Llama and Qwen that Hugging Face hosts; the paper pairs neighbours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb.networks.transformer import config as config_lib


class Rotation(NamedTuple):
  """cos and sin of each position's angles, both f32 [B, L, d / 2]."""

  cos: jax.Array
  sin: jax.Array


def frequencies(config: config_lib.TransformerConfig) -> np.ndarray:
  """f32 [d / 2], radians per position."""
  exponent = np.arange(0, config.head_size, 2) / config.head_size
  frequency = config.rope_theta**-exponent
  scaling = config.rope_scaling
  if scaling is not None:
    turns = scaling.original_length * frequency / (2 * math.pi)
    # 0 where the wavelength is long and stretched, 1 where it is kept.
    kept = np.clip(
      (turns - scaling.low_frequency_factor)
      / (scaling.high_frequency_factor - scaling.low_frequency_factor),
      0,
      1,
    )
    frequency = frequency * (kept + (1 - kept) / scaling.factor)
  return frequency.astype(np.float32)


def rotation(
  config: config_lib.TransformerConfig, segment_positions: jax.Array
) -> Rotation:
  """The rotation of each position.

  Args:
    config: of the model.
    segment_positions: i32 [B, L], 0 at the first position of a segment.
  """
  chex.assert_rank(segment_positions, 2)
  angles = (
    segment_positions.astype(jnp.float32)[:, :, None]
    * jnp.asarray(frequencies(config))[None, None, :]
  )
  return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
  """Turns each head's features; [B, L, heads, d], in f32, dtype kept."""
  chex.assert_rank(x, 4)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  cos, sin = by.cos[:, :, None, :], by.sin[:, :, None, :]
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  ).astype(x.dtype)
