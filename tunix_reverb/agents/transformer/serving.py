"""An endpoint in place of an actor: agents outside play, we record."""

from __future__ import annotations

import pathlib
from typing import Any

from tunix_reverb import errors
from tunix_reverb.actor import turn_loop
from tunix_reverb.agents import agent as agent_lib
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents.transformer import acting
from tunix_reverb.networks.transformer import config as model_config

# Of a request that waits for a free slot. OpenAI's client waits 600.
_SLOT_TIMEOUT_S = 300.0


class EndpointLoop(turn_loop.TurnLoop):
  """A loop that nothing is wrong with when nobody asks.

  Attributes:
    counts: of the conversations, `conversations.Counts`.
  """

  counts: Any = None

  @property
  def is_waiting(self) -> bool:
    """See base class; for permits, or for agents outside."""
    return not (self._engine.has_work or self._outbox)

  def metrics(self) -> dict[str, float]:
    """See base class."""
    return {
      **super().metrics(),
      'segments_cut_total': self.counts.segments_cut,
      'conversations_abandoned_total': self.counts.abandoned,
    }


def make_serving(
  config: config_lib.ExperimentConfig,
  play: acting.Play,
  model: model_config.TransformerConfig,
  **kwargs: Any,
) -> agent_lib.Acting:
  """Starts to listen, and makes the loop that answers.

  Args:
    config: of the run.
    play: how conversations are written.
    model: what the transformer is.
    **kwargs: see `agent.Agent.make_acting`.

  Raises:
    errors.UserError: the port cannot be had, or the config does not suit.
  """
  size, num = config.transformer.group_size, config.actor.environments_per_actor
  if play.chat_format is None or size > 1:
    raise errors.UserError(
      f'environment ({config.environment!r}) and group_size ({size}) do not '
      'suit an endpoint: set --environment=outside, --group_size=1'
    )
  # Here, because only endpoints need their libraries.
  try:
    from tunix_reverb.actor.endpoint import engine as engine_lib
    from tunix_reverb.actor.endpoint import sessions as sessions_lib

    sessions = sessions_lib.Sessions(
      num_slots=num, max_length=config.actor.trajectory_length + 1
    )
    engine = engine_lib.ListenedEngine(
      sessions=sessions, **acting.engine_settings(config, play, model, num)
    )
    made = acting.make_loop(
      config,
      play,
      environment=sessions,
      engine=engine,
      kind=EndpointLoop,
      **kwargs,
    )
    made.loop.counts = _serve(config, play, sessions, kwargs['actor_id'])
  except ImportError as e:
    raise errors.MissingExtraError(
      f'an endpoint needs the package {e.name}: install the extra agents'
    ) from e
  return made


def _serve(
  config: config_lib.ExperimentConfig,
  play: acting.Play,
  sessions: Any,
  actor_id: int,
) -> Any:
  """Listens until the sessions are closed; returns the counts."""
  from tunix_reverb.actor.endpoint import app
  from tunix_reverb.actor.endpoint import conversations
  from tunix_reverb.actor.endpoint import server as server_lib

  limits = conversations.Limits(
    max_length=config.actor.trajectory_length + 1,
    max_turn_tokens=play.max_turn_tokens,
    slot_timeout_s=_SLOT_TIMEOUT_S,
    turn_timeout_s=config.replay.permit_lease_s,
    idle_timeout_s=config.actor.environment_timeout_s,
  )
  settings = config.transformer
  talk = conversations.Conversations(sessions, play.chat_format, limits)
  endpoint = app.Endpoint(
    talk, play.chat_format, model=pathlib.Path(settings.model).name
  )
  server = server_lib.Server(
    endpoint.make_app(),
    host=settings.endpoint_host,
    port=settings.endpoint_port and settings.endpoint_port + actor_id,
  )
  sessions.on_close(server.close)
  sessions.on_close(endpoint.close)
  print(
    f'endpoint: http://{settings.endpoint_host}:{server.port}/v1 takes chat '
    f'completions, {sessions.num_environments} conversations at a time',
    flush=True,
  )
  return talk.counts
