"""Serves the policy to agents outside, and records what they do with it.

An OpenAI-compatible endpoint in place of an actor:

  POST /v1/chat/completions      with the header X-Episode-Id: <any name>
  POST /v1/episodes/<name>/reward  {"reward": 1.0} ends the episode

Point the base URL of any agent at it. What the policy wrote becomes one
trajectory for each episode; the learner trains on them. Plain text, no
authentication: keep it on the loopback or in a private network.
"""

from __future__ import annotations

from launch import actor
from launch import app


def run_endpoint(context: app.RoleContext) -> int:
  """Serves until told to stop."""
  from tunix_reverb import errors

  if context.config.agent != 'transformer':
    raise errors.UserError(
      f'agent ({context.config.agent!r}) must be transformer: other policies '
      'write no text'
    )
  return actor.run_actor(context, 'make_serving')


def main() -> None:
  """Entry point."""
  app.run(
    run_endpoint,
    role='endpoint',
    make_role_name=lambda f: f'actor_{f.actor_id}',
    single_threaded_xla=True,
  )


if __name__ == '__main__':
  main()
