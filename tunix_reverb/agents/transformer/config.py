"""The transformer's part of the config; see `agents.config`."""

from __future__ import annotations

import dataclasses

from tunix_reverb.agents import fields
from tunix_reverb.networks.transformer import config as model_config
from tunix_reverb.networks.transformer import presets

# `token_loss.RATIOS` and `policy_loss.KINDS`, which need JAX.
ADVANTAGES = ('none', 'grpo', 'rloo')
IMPORTANCE_RATIOS = ('token', 'turn', 'turn_geometric')
# The environment of a run that is played through its endpoints.
OUTSIDE = 'outside'
LOSSES = ('vtrace', 'tis', 'ppo', 'uncorrected')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """The transformer policy, with --agent=transformer."""

  model: str = fields.field(
    'tiny',
    'The sizes of a transformer from scratch, whose vocabulary is the '
    "environment's, of: "
    + ', '.join(presets.PRESETS)
    + '. Or a pretrained one: the path of a directory of Hugging Face '
    '(safetensors; Llama, Qwen2, Qwen3) or of a .gguf file, with its tokeniser '
    'and chat template.',
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
  loss: str = fields.field(
    'vtrace',
    'What the policy is moved by: V-trace; truncated importance sampling (tis) '
    'for small lags; decoupled PPO (ppo) for several updates_per_batch; or '
    'uncorrected, when no data are older than the policy. On the advantages of '
    'groups, vtrace is tis with the cap rho_bar.',
    LOSSES,
  )
  tis_cap: float = fields.field(
    2.0, 'Cap of the importance ratio, with --loss=tis.'
  )
  ppo_clip_low: float = fields.field(
    0.2,
    'How far an update may take the probability of a bad token below what it '
    'was, as a fraction, with --loss=ppo, as the next three.',
  )
  ppo_clip_high: float = fields.field(
    0.28, 'How far it may raise that of a good one above, as a fraction.'
  )
  ppo_dual_clip: float = fields.field(
    3.0, 'Most that a bad token weighs in the loss, as a ratio; above 1.'
  )
  ppo_behaviour_cap: float = fields.field(
    5.0, 'Tokens whose ratio to the behaviour policy is above are left out.'
  )
  value_trunk: bool = fields.field(
    False,
    'Values come from layers of their own, as many as the policy has, and not '
    'from its last: for learned values and data that are many updates old.',
  )
  temperature: float = fields.field(
    1.0,
    'Temperature at which actors sample, no unit; the learner learns the '
    'policy at this temperature, too.',
  )
  max_turns: int = fields.field(
    0, "Turns after which an episode is cut; 0 takes the task's own limit."
  )
  max_turn_tokens: int = fields.field(
    0, "Tokens after which a turn is cut; 0 takes the task's own limit."
  )
  group_size: int = fields.field(
    1,
    'Episodes of one task that begin together and are learnt together, under '
    'one permit.',
  )
  advantage: str = fields.field(
    'none',
    'How the rewards of a group say what each of its episodes is worth: grpo, '
    'rloo, or none, where the learned values say it.',
    ADVANTAGES,
  )
  policy_url: str = fields.field(
    '',
    'Base URL, with its /v1, of an OpenAI-compatible server that plays in '
    "place of the actors' own engine and tells token ids and their "
    'log-probabilities, such as vLLM with the same vocabulary.',
  )
  endpoint_host: str = fields.field(
    '127.0.0.1',
    'Address on which launch.endpoint listens, as plain text and for anybody '
    'who reaches it.',
  )
  endpoint_port: int = fields.field(
    8080, 'Port of the endpoint with --actor_id=0; the others follow.'
  )
  evaluate_sampled: bool = fields.field(
    False,
    'Evaluation episodes are sampled like those of actors, instead of taking '
    'the most likely tokens.',
  )

  def __post_init__(self) -> None:
    fields.validate_choices(self)
    fields.require(
      self.model in presets.PRESETS
      or '/' in self.model
      or self.model.endswith('.gguf'),
      'model',
      self.model,
      f'be one of {", ".join(presets.PRESETS)}, or a path with a slash of a '
      'pretrained model',
    )
    fields.require(
      not self.value_trunk or self.model in presets.PRESETS,
      'value_trunk',
      self.value_trunk,
      f'be false with a pretrained model ({self.model}), whose values come '
      'from its own layers',
    )
    fields.positive(self, 'group_size')
    fields.non_negative(self, 'max_turns', 'max_turn_tokens')
    fields.require(
      (self.group_size > 1) == (self.advantage != 'none'),
      'group_size and advantage',
      (self.group_size, self.advantage),
      'go together: set --group_size above 1 and --advantage=grpo or rloo, or '
      'neither',
    )
    fields.positive(
      self, 'temperature', 'tis_cap', 'ppo_clip_high', 'ppo_behaviour_cap'
    )
    fields.require(
      0.0 < self.ppo_clip_low < 1.0,
      'ppo_clip_low',
      self.ppo_clip_low,
      'be above 0 and below 1',
    )
    fields.require(
      self.ppo_dual_clip > 1.0, 'ppo_dual_clip', self.ppo_dual_clip, 'be > 1'
    )
