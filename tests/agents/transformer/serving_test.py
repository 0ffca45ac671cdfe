"""An endpoint whole: OpenAI's client, the engine, the loop, trajectories."""

import contextlib
import io
import threading
import time

import jax
import numpy as np
import pytest
import tiny_chat

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.agents import builder
from tunix_reverb.agents import flat
from tunix_reverb.models import checkpoint
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.telemetry import metrics

for library in ('openai', 'starlette', 'tokenizers', 'uvicorn'):
  pytest.importorskip(library, reason=f'{library} is missing')

import httpx  # noqa: E402
import openai  # noqa: E402

from tunix_reverb.actor.endpoint import server  # noqa: E402

_FLAGS = {
  'agent': 'transformer',
  'environment': 'outside',
  # Few programs of the engine.
  'environments_per_actor': 1,
  'trajectory_length': 127,
  'max_turn_tokens': 12,
  'item_bytes': 1,
  'bucket_lengths': (128,),
  'endpoint_port': 0,
}


class _Variables(core.VariableSource):
  """The model's params, as if a learner had published them."""

  def __init__(self, path):
    mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
    params = checkpoint.open_checkpoint(path).load(
      mesh, key=jax.random.PRNGKey(0)
    )
    self._variables = types.Variables(3, params)

  def get_variables(self, min_version=0, timeout_s=0.0):
    return self._variables if min_version <= 3 else None

  def age_s(self):
    return 0.0

  def close(self):
    pass


class _Writer:
  """Keeps what is written."""

  def __init__(self):
    self.items = []
    self.has_written = threading.Event()

  def write(self, item):
    self.items.append(item)
    self.has_written.set()
    return True


class _Endpoint:
  """Runs the loop in a thread, as the role does."""

  def __init__(self, path, **flags):
    config = flat.from_flat({**_FLAGS, 'model': path, **flags})
    self.agent = builder.make_agent(config)
    self.writer = _Writer()
    self.acting = self.agent.make_serving(
      config, actor_id=0, writer=self.writer, variables=_Variables(path)
    )
    assert self.acting.loop.wait_for_variables(1.0)
    self._is_over = False
    self._thread = threading.Thread(target=self._run)
    self._thread.start()

  def _run(self):
    while not self._is_over:
      self.acting.loop.step(0.02)

  def close(self):
    self._is_over = True
    self._thread.join(10)
    self.acting.environment.close()
    self.acting.loop.close()


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  return tiny_chat.write(tmp_path_factory.mktemp('model') / 'tiny')


@pytest.fixture(scope='module')
def endpoint(path):
  """One for all tests: making it compiles the engine's programs."""
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    endpoint = _Endpoint(path)
  endpoint.url = out.getvalue().split()[1]
  yield endpoint
  endpoint.close()


def _tokens(chat, choice):
  """Log-probabilities of a choice, by OpenAI's words."""
  return [entry.logprob for entry in choice.logprobs.content]


def test_a_conversation_becomes_the_trajectory_of_its_tokens(endpoint):
  chat = endpoint.agent.play.chat_format
  user = {'role': 'user', 'content': 'hello'}
  with openai.OpenAI(
    base_url=endpoint.url,
    api_key='none',
    default_headers={'X-Episode-Id': 'a'},
    max_retries=0,
    timeout=30,
  ) as client:
    ask = lambda messages, **kwargs: client.chat.completions.create(
      model='tiny', messages=messages, logprobs=True, **kwargs
    )
    first = ask([user])
    said = first.choices[0].message.model_dump(exclude_none=True)
    tool = {'role': 'tool', 'tool_call_id': '1', 'content': 'the result'}
    second = ask([user, said, tool], max_tokens=5)
  answer = httpx.post(
    f'{endpoint.url}/episodes/a/reward', json={'reward': 0.75}, timeout=10
  )
  assert answer.json()['segments'] == 1
  assert endpoint.writer.has_written.wait(10)
  item = endpoint.writer.items[-1]
  prompt = chat.first([user], [])
  size = first.usage.completion_tokens
  written = item.observation.tolist()
  assert written[: len(prompt)] == prompt
  turn = written[len(prompt) : len(prompt) + size]
  following = chat.following([tool], ended=turn[-1] in chat.stop_tokens)
  begin = len(prompt) + size
  assert written[begin : begin + len(following)] == following
  assert len(written) == second.usage.total_tokens
  log_probs = [*_tokens(chat, first.choices[0])]
  log_probs += _tokens(chat, second.choices[0])
  np.testing.assert_allclose(
    item.behaviour_log_prob[item.loss_mask], log_probs, rtol=1e-6
  )
  assert item.loss_mask.sum() == len(log_probs)
  assert item.reward[-1] == 0.75 and item.reward.sum() == 0.75
  assert item.discount[-1] == 0.0 and not item.truncated[0]
  assert set(item.policy_version[item.loss_mask].tolist()) == {3}


def test_a_changed_conversation_becomes_two_trajectories(endpoint):
  headers = {'X-Episode-Id': 'b'}
  ask = lambda *messages: httpx.post(
    f'{endpoint.url}/chat/completions',
    headers=headers,
    json={
      'messages': [{'role': 'user', 'content': text} for text in messages],
      'max_tokens': 3,
    },
    timeout=30,
  )
  before = len(endpoint.writer.items)
  assert ask('one').status_code == 200
  assert ask('two', 'three').status_code == 200
  httpx.post(f'{endpoint.url}/episodes/b/reward', json={'reward': 1})
  deadline_s = time.monotonic() + 10
  while len(endpoint.writer.items) < before + 2:
    assert time.monotonic() < deadline_s
    time.sleep(0.01)
  first, second = endpoint.writer.items[before:]
  assert first.truncated[0] and first.reward.sum() == 0.0
  assert not second.truncated[0] and second.reward.sum() == 1.0
  reported = endpoint.acting.loop.metrics()
  metrics.check_names(reported)
  assert reported['segments_cut_total'] == 1
  assert reported['conversations_abandoned_total'] == 0


def test_nobody_asking_is_no_lack_of_progress(endpoint):
  assert endpoint.acting.loop.is_waiting
  assert not endpoint.acting.loop.is_parked


def test_groups_do_not_suit_agents_outside(path):
  with pytest.raises(errors.UserError, match='do not suit an endpoint'):
    _Endpoint(path, group_size=2, advantage='grpo')


def test_a_port_in_use_is_refused(endpoint):
  port = int(endpoint.url.rpartition(':')[2].partition('/')[0])
  with pytest.raises(errors.UserError, match='endpoint_port'):
    server.Server(None, host='127.0.0.1', port=port)
