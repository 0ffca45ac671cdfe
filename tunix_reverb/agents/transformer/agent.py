"""The agent of a transformer: V-trace over tokens, sharded over a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from tunix_reverb import types
from tunix_reverb.actor import evaluation
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents.transformer import acting
from tunix_reverb.agents.transformer import pretrained
from tunix_reverb.agents.transformer import serving
from tunix_reverb.learner import objectives
from tunix_reverb.models import checkpoint as checkpoint_lib
from tunix_reverb.networks.transformer import config as model_config
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.ops import policy_loss


@dataclasses.dataclass(frozen=True)
class TransformerAgent(agent_lib.Agent):
  """See base class.

  Attributes:
    play: how the environment is played.
    model: what the transformer is.
    columns: `specs.ColumnSpec` of every column of an item.
    checkpoint: of a pretrained model.
  """

  play: acting.Play
  model: model_config.TransformerConfig
  columns: types.Trajectories
  checkpoint: checkpoint_lib.Checkpoint | None = None

  def initial_params(
    self, mesh: jax.sharding.Mesh, *, key: jax.Array
  ) -> types.Nest | None:
    return (
      None if self.checkpoint is None else self.checkpoint.load(mesh, key=key)
    )

  def make_acting(
    self, config: config_lib.ExperimentConfig, **kwargs: Any
  ) -> agent_lib.Acting:
    return acting.make_acting(config, self.play, self.model, **kwargs)

  def make_serving(
    self, config: config_lib.ExperimentConfig, **kwargs: Any
  ) -> agent_lib.Acting:
    """What an endpoint runs; see `make_acting`."""
    return serving.make_serving(config, self.play, self.model, **kwargs)

  def make_evaluator(
    self, config: config_lib.ExperimentConfig
  ) -> evaluation.Evaluator:
    return acting.make_evaluator(config, self.play, self.model)

  def make_objective(
    self, config: config_lib.ExperimentConfig, mesh: jax.sharding.Mesh
  ) -> objectives.Objective:
    settings = config.transformer
    compute = model_config.ComputeConfig(
      dtype=settings.compute_dtype, remat=settings.remat
    )
    return objectives.token_objective(
      model_lib.make_transformer(
        self.model, mesh, compute, temperature=settings.temperature
      ),
      agent_lib.loss_config(config.learner),
      ratio=settings.importance_ratio,
      policy_loss=policy_loss.PolicyLoss(
        kind=settings.loss,
        tis_cap=settings.tis_cap,
        ppo_clip_low=settings.ppo_clip_low,
        ppo_clip_high=settings.ppo_clip_high,
        ppo_dual_clip=settings.ppo_dual_clip,
        ppo_behaviour_cap=settings.ppo_behaviour_cap,
      ),
    )


def make_agent(config: config_lib.ExperimentConfig) -> TransformerAgent:
  """Makes one environment to read its specs.

  Raises:
    errors.UserError: it is not an environment of turns.
  """
  name = config.transformer.model
  checkpoint = pretrained.open_checkpoint(name)
  play = acting.make_play(config, pretrained.chat_format(name))
  model = pretrained.architecture(
    checkpoint, name, vocabulary_size=play.vocabulary_size
  )
  model = dataclasses.replace(model, value_trunk=config.transformer.value_trunk)
  return TransformerAgent(play, model, play.columns(), checkpoint)
