"""An endpoint with a scripted policy, and OpenAI's own client for it."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

for library in ('openai', 'starlette', 'uvicorn'):
  pytest.importorskip(library, reason=f'{library} is missing')

import byte_format  # noqa: E402
import openai  # noqa: E402

from tunix_reverb.actor.endpoint import app  # noqa: E402
from tunix_reverb.actor.endpoint import conversations  # noqa: E402
from tunix_reverb.actor.endpoint import server  # noqa: E402
from tunix_reverb.actor.endpoint import sessions  # noqa: E402

_LIMITS = {
  'max_length': 400,
  'max_turn_tokens': 100,
  'slot_timeout_s': 0.3,
  'turn_timeout_s': 5.0,
  'idle_timeout_s': 60.0,
}


class Rig:
  """What a test has of an endpoint.

  Attributes:
    policy: scripted.
    sessions: where it meets the agents.
    conversations: of the agents.
    url: of the server.
  """

  def __init__(self, *says, num_slots=2, **limits):
    self.sessions = sessions.Sessions(num_slots=num_slots, max_length=400)
    self.policy = byte_format.ScriptedPolicy(
      self.sessions, *map(byte_format.turn, says)
    )
    chat_format = byte_format.ByteFormat()
    self.conversations = conversations.Conversations(
      self.sessions, chat_format, conversations.Limits(**_LIMITS | limits)
    )
    self.endpoint = app.Endpoint(self.conversations, chat_format, model='tiny')
    self._server = server.Server(
      self.endpoint.make_app(), host='127.0.0.1', port=0
    )
    self.url = f'http://127.0.0.1:{self._server.port}'
    self._clients = []

  def client(self, episode, **kwargs):
    """OpenAI's client, as an agent makes it."""
    client = openai.OpenAI(
      base_url=f'{self.url}/v1',
      api_key='none',
      default_headers={'X-Episode-Id': episode} if episode else {},
      **{'max_retries': 0, 'timeout': 10} | kwargs,
    )
    self._clients.append(client)
    return client

  def close(self):
    for client in self._clients:
      client.close()
    self._server.close()
    self.policy.close()
    self.sessions.close()


@pytest.fixture
def make_rig():
  rigs = []

  def make(*says, **kwargs):
    rigs.append(Rig(*says, **kwargs))
    return rigs[-1]

  yield make
  for rig in rigs:
    rig.close()
