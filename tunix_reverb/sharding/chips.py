"""What the chips can do that a learner may run on, by their published figures.

Sources, as of 2026-11:
- v5e: https://cloud.google.com/tpu/docs/v5e (197 TFLOP/s, 16 GB, 819 GB/s, four
  ports with 400 GB/s in both directions together).
- v5p: https://cloud.google.com/tpu/docs/v5p (459 TFLOP/s, 95 GB, 2765 GB/s, six
  ports with 1200 GB/s in both directions together).
- v6e: https://cloud.google.com/tpu/docs/v6e (918 TFLOP/s, 32 GB, 1640 GB/s,
  four ports with 800 GB/s in both directions together).
- h100, SXM: https://www.nvidia.com/en-us/data-center/h100 (1979 TFLOP/s with
  sparsity, half of that without; 80 GB, 3.35 TB/s, NVLink 900 GB/s in both
  directions together).
- h200, SXM: https://www.nvidia.com/en-us/data-center/h200 (the same, with
  141 GB and 4.8 TB/s).

Of a TPU's memory a program gets what the compiler's own message says is
available (libtpu 0.0.50); of a GPU's, `XLA_PYTHON_CLIENT_MEM_FRACTION`, which
must be set to more than its default of 0.75 to come near to the figure here.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

from tunix_reverb import errors

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """One chip, which is one JAX device.

  Attributes:
    name: ours.
    platform: JAX's, 'tpu', 'gpu' or 'cpu'.
    flops_per_s: peak of dense bfloat16 products.
    memory_bytes: of its memory, what a program can have.
    memory_bytes_per_s: peak.
    link_bytes_per_s: what it can send during a collective along one mesh axis.
      On a TPU an axis is taken to be one dimension of the torus, with a link
      in either direction; a GPU sends all it has into the switch.
    product_passes: time of a product relative to bfloat16, by the precision of
      one of float32 operands.
  """

  name: str
  platform: str
  flops_per_s: float
  memory_bytes: float
  memory_bytes_per_s: float
  link_bytes_per_s: float
  product_passes: Mapping[str, float]


# Products of float32 are made of bfloat16 ones (`jax.lax.Precision`).
_TPU_PASSES = {'default': 1.0, 'high': 3.0, 'highest': 6.0}
# TF32 has half the rate; 67 TFLOP/s is that of float32 without tensor cores.
_GPU_PASSES = {'default': 2.0, 'high': 2.0, 'highest': 989.5 / 67}

CHIPS: Mapping[str, Chip] = {
  chip.name: chip
  for chip in (
    Chip(
      name='v5e',
      platform='tpu',
      flops_per_s=197e12,
      memory_bytes=15.75 * _GIB,
      memory_bytes_per_s=819e9,
      link_bytes_per_s=400e9 / 4,
      product_passes=_TPU_PASSES,
    ),
    Chip(
      name='v5p',
      platform='tpu',
      flops_per_s=459e12,
      memory_bytes=95.72 * _GIB,
      memory_bytes_per_s=2765e9,
      link_bytes_per_s=1200e9 / 6,
      product_passes=_TPU_PASSES,
    ),
    Chip(
      name='v6e',
      platform='tpu',
      flops_per_s=918e12,
      memory_bytes=31.24 * _GIB,
      memory_bytes_per_s=1640e9,
      link_bytes_per_s=800e9 / 4,
      product_passes=_TPU_PASSES,
    ),
    Chip(
      name='h100',
      platform='gpu',
      flops_per_s=989.5e12,
      memory_bytes=80e9,
      memory_bytes_per_s=3.35e12,
      link_bytes_per_s=450e9,
      product_passes=_GPU_PASSES,
    ),
    Chip(
      name='h200',
      platform='gpu',
      flops_per_s=989.5e12,
      memory_bytes=141e9,
      memory_bytes_per_s=4.8e12,
      link_bytes_per_s=450e9,
      product_passes=_GPU_PASSES,
    ),
  )
}


def get(name: str) -> Chip:
  """The chip `name`.

  Raises:
    errors.UserError: there is none of that name.
  """
  if name not in CHIPS:
    raise errors.UserError(f'chip ({name!r}) must be one of {", ".join(CHIPS)}')
  return CHIPS[name]
