"""Torsos: observations of P positions in, features [P, D] out.

P flattens every leading dim (B * L positions of a batch, or K environments),
so that no convolution ever runs inside a scan: on CPU its gradient is about 10
times slower there.
"""

from __future__ import annotations

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb import types


class MLPTorso(nn.Module):
  """Dense layers with tanh on the flattened, concatenated observation nest."""

  hidden_sizes: tuple[int, ...]

  @nn.compact
  def __call__(self, observation: types.Nest) -> jax.Array:
    leaves = jax.tree_util.tree_leaves(observation)
    flat = [_as_float(leaf).reshape(leaf.shape[0], -1) for leaf in leaves]
    x = jnp.concatenate(flat, axis=-1)
    for i, size in enumerate(self.hidden_sizes):
      x = jnp.tanh(nn.Dense(size, name=f'layer_{i}')(x))
    return x


class AtariTorso(nn.Module):
  """The shallow convolutional net of Mnih et al. 2013 (arXiv:1312.5602)."""

  @nn.compact
  def __call__(self, observation: types.Nest) -> jax.Array:
    x = _as_float(_single_leaf(observation))
    x = nn.relu(nn.Conv(16, (8, 8), (4, 4), name='conv_0')(x))
    x = nn.relu(nn.Conv(32, (4, 4), (2, 2), name='conv_1')(x))
    x = x.reshape(x.shape[0], -1)
    return nn.relu(nn.Dense(256, name='output')(x))


class ImpalaTorso(nn.Module):
  """The 15-layer residual net of Espeholt et al. 2018, figure 3, right."""

  num_channels: tuple[int, ...] = (16, 32, 32)
  num_blocks: int = 2

  @nn.compact
  def __call__(self, observation: types.Nest) -> jax.Array:
    x = _as_float(_single_leaf(observation))
    for i, channels in enumerate(self.num_channels):
      x = nn.Conv(channels, (3, 3), name=f'section_{i}')(x)
      x = nn.max_pool(x, (3, 3), strides=(2, 2), padding='SAME')
      for j in range(self.num_blocks):
        x = _ResidualBlock(channels, name=f'section_{i}_block_{j}')(x)
    x = nn.relu(x).reshape(x.shape[0], -1)
    return nn.relu(nn.Dense(256, name='output')(x))


class _ResidualBlock(nn.Module):
  """Two 3 x 3 convolutions around a skip connection."""

  channels: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = nn.Conv(self.channels, (3, 3), name='conv_0')(nn.relu(x))
    y = nn.Conv(self.channels, (3, 3), name='conv_1')(nn.relu(y))
    return x + y


def make_torso(
  name: str, observation_spec: types.Nest, *, hidden_sizes: tuple[int, ...]
) -> nn.Module:
  """Builds the torso `name` for `observation_spec`.

  Args:
    name: 'mlp', 'impala', 'atari', or 'auto' (impala for a single [H, W, C]
      uint8 observation, else mlp).
    observation_spec: nest of dm_env specs of one observation.
    hidden_sizes: layer sizes of the MLP, units.

  Raises:
    ValueError: an unknown name, or a convolution on something not an image.
  """
  leaves = jax.tree_util.tree_leaves(observation_spec)
  is_image = len(leaves) == 1 and len(leaves[0].shape) == 3
  if name == 'auto':
    is_uint8 = is_image and np.dtype(leaves[0].dtype) == np.uint8
    name = 'impala' if is_uint8 else 'mlp'
  if name == 'mlp':
    return MLPTorso(tuple(hidden_sizes))
  if name not in ('impala', 'atari'):
    raise ValueError(f'torso ({name!r}) must be auto, mlp, impala or atari')
  if not is_image:
    shapes = ', '.join(str(leaf.shape) for leaf in leaves)
    raise ValueError(
      f'torso ({name!r}) must be mlp for observations of shape {shapes}; '
      'impala and atari take one [H, W, C] image'
    )
  return ImpalaTorso() if name == 'impala' else AtariTorso()


def _as_float(leaf: jax.Array) -> jax.Array:
  """float32 of [P, ...]; uint8 images [P, H, W, C] are scaled to 0..1."""
  x = leaf.astype(jnp.float32)
  return x / 255.0 if leaf.dtype == jnp.uint8 and leaf.ndim == 4 else x


def _single_leaf(observation: types.Nest) -> jax.Array:
  (leaf,) = jax.tree_util.tree_leaves(observation)
  return leaf
