"""The transformer's part of the config; see `agents.config`."""

from __future__ import annotations

import dataclasses

from tunix_reverb.agents import fields
from tunix_reverb.networks.transformer import config as model_config
from tunix_reverb.networks.transformer import presets

IMPORTANCE_RATIOS = ('token', 'turn', 'turn_geometric')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """The transformer policy, with --agent=transformer."""

  model: str = fields.field(
    'tiny',
    "The transformer's sizes; its vocabulary is the environment's.",
    tuple(presets.PRESETS),
  )
  compute_dtype: str = fields.field(
    'float32',
    'Dtype of the blocks, in actors too; master params, both heads and the '
    'loss are float32. bfloat16 is for accelerators.',
    model_config.COMPUTE_DTYPES,
  )
  remat: str = fields.field(
    'attention',
    'What the forward pass keeps for the backward pass, the rest is computed '
    "again: each layer's input (layer, the least memory), also the output of "
    'attention, also products of matrices (dots), or everything (none).',
    model_config.REMAT_POLICIES,
  )
  importance_ratio: str = fields.field(
    'token',
    'What has one importance ratio: each token, or each turn, as the product '
    'or as the geometric mean of its tokens.',
    IMPORTANCE_RATIOS,
  )
  temperature: float = fields.field(
    1.0,
    'Temperature at which actors sample, no unit; the learner learns the '
    'policy at this temperature, too.',
  )

  def __post_init__(self) -> None:
    fields.validate_choices(self)
    fields.positive(self, 'temperature')
