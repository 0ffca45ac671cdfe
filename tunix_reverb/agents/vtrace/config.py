"""The policy network's part of the config; see `agents.config`."""

from __future__ import annotations

import dataclasses

from tunix_reverb.agents import fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkConfig:
  """The policy network."""

  torso: str = fields.field(
    'auto',
    'Observation torso: mlp, impala (residual conv for [H, W, C] images), '
    'atari (the shallow conv 16-32 + 256), or auto (impala for rank-3 '
    'uint8 observations, else mlp).',
    ('auto', 'mlp', 'impala', 'atari'),
  )
  hidden_sizes: tuple[int, ...] = fields.field(
    (64, 64), 'Layer sizes of the MLP torso, units.'
  )
  core: str = fields.field(
    'none', 'Recurrent core after the torso.', ('none', 'lstm', 'gru')
  )
  core_size: int = fields.field(64, 'Size of the recurrent core, units.')

  def __post_init__(self) -> None:
    fields.validate_choices(self)
    fields.positive(self, 'core_size')
    fields.require(
      len(self.hidden_sizes) > 0 and all(n > 0 for n in self.hidden_sizes),
      'hidden_sizes',
      self.hidden_sizes,
      'hold at least one size, all > 0',
    )
