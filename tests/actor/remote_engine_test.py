"""Turns of somebody else's server, which is a small one here."""

from http import server
import json
import threading
import time

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.actor import remote_engine

pytest.importorskip('httpx', reason='httpx is missing')

_STOP = 9


def _vllm(tokens, log_probs):
  return {
    'token_ids': tokens,
    'logprobs': {'tokens': ['?'] * len(tokens), 'token_logprobs': log_probs},
  }


def _older_vllm(tokens, log_probs):
  names = [f'token_id:{token}' for token in tokens]
  return {'logprobs': {'tokens': names, 'token_logprobs': log_probs}}


def _llama_cpp(tokens, log_probs):
  content = [
    {'id': token, 'logprob': value, 'token': '?'}
    for token, value in zip(tokens, log_probs)
  ]
  return {'logprobs': {'content': content}}


class _Server:
  """Answers with prompt tokens + 1, backwards, then the stop token.

  Attributes:
    asked: bodies of the requests.
    fails: how many requests to answer with status 503 yet.
    form: of the answers.
    wait: requests wait for it.
  """

  def __init__(self, form=_vllm):
    self.asked, self.fails, self.form = [], 0, form
    self.wait = threading.Event()
    self.wait.set()
    rig = self

    class Handler(server.BaseHTTPRequestHandler):
      def do_GET(self):
        self._answer(200, {'data': [{'id': 'theirs'}]})

      def do_POST(self):
        size = int(self.headers['Content-Length'])
        body = json.loads(self.rfile.read(size))
        rig.asked.append(body)
        rig.wait.wait(10)
        if rig.fails:
          rig.fails -= 1
          self._answer(503, {})
          return
        tokens = [t + 1 for t in body['prompt'][::-1]] + [_STOP, 5]
        tokens = tokens[: body['max_tokens']]
        log_probs = [-0.25 * (i + 1) for i in range(len(tokens))]
        self._answer(200, {'choices': [rig.form(tokens, log_probs)]})

      def _answer(self, status, values):
        text = json.dumps(values).encode()
        self.send_response(status)
        self.send_header('Content-Length', str(len(text)))
        self.end_headers()
        self.wfile.write(text)

      def log_message(self, *args):
        pass

    self._http = server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._http.daemon_threads = True
    self._thread = threading.Thread(target=self._http.serve_forever)
    self._thread.start()
    self.url = f'http://127.0.0.1:{self._http.server_port}/v1'

  def close(self):
    self.wait.set()
    self._http.shutdown()
    self._http.server_close()
    self._thread.join(5)


@pytest.fixture
def make_engine(monkeypatch):
  monkeypatch.setattr(remote_engine, '_BACK_OFF_S', 0.01)
  made = []

  def make(form=_vllm):
    theirs = _Server(form)
    made.append(theirs)
    engine = remote_engine.RemoteEngine(
      theirs.url,
      num_slots=2,
      max_length=20,
      stop_tokens=(_STOP,),
      temperature=0.5,
      timeout_s=10.0,
    )
    made.append(engine)
    engine.set_variables(types.Variables(4, None))
    return engine, theirs

  yield make
  for part in made[::-1]:
    part.close()


def _next_turns(engine, count=1):
  turns, deadline_s = [], time.monotonic() + 10
  while len(turns) < count:
    assert time.monotonic() < deadline_s
    turns += engine.step()
  return sorted(turns, key=lambda turn: turn.slot)


@pytest.mark.parametrize('form', [_vllm, _older_vllm, _llama_cpp])
def test_a_turn_is_what_the_server_sampled_up_to_its_stop_token(
  make_engine, form
):
  engine, theirs = make_engine(form)
  engine.start(0, 7)
  engine.feed(0, [1, 2], 6)
  assert engine.has_work and engine.num_active == 1
  (turn,) = _next_turns(engine)
  assert turn.slot == 0 and turn.tokens.tolist() == [3, 2, _STOP]
  np.testing.assert_allclose(turn.log_probs, [-0.25, -0.5, -0.75])
  assert turn.policy_versions.tolist() == [4, 4, 4]
  assert turn.tokens.dtype == np.int32 and turn.log_probs.dtype == np.float32
  assert not engine.has_work and engine.tokens_total == 3
  asked = theirs.asked[0]
  assert asked['model'] == 'theirs' and asked['temperature'] == 0.5
  assert asked['prompt'] == [1, 2] and asked['max_tokens'] == 6


def test_the_next_turn_goes_on_from_the_tokens_of_both(make_engine):
  engine, theirs = make_engine()
  engine.start(1, 7)
  engine.feed(1, [1], 2)
  _next_turns(engine)
  engine.set_variables(types.Variables(5, None))
  engine.feed(1, [6], 30)
  (turn,) = _next_turns(engine)
  assert theirs.asked[1]['prompt'] == [1, 2, _STOP, 6]
  assert theirs.asked[1]['max_tokens'] == 20 - 4
  assert theirs.asked[1]['seed'] != theirs.asked[0]['seed']
  assert set(turn.policy_versions.tolist()) == {5}


def test_slots_are_served_side_by_side_and_episodes_may_be_given_up(
  make_engine,
):
  engine, theirs = make_engine()
  theirs.wait.clear()
  for slot in (0, 1):
    engine.start(slot, slot)
    engine.feed(slot, [slot + 1], 8)
  assert engine.step() == [] and engine.num_active == 2
  engine.start(0, 5)  # Its turn is nobody's now.
  theirs.wait.set()
  (turn,) = _next_turns(engine)
  assert turn.slot == 1 and not engine.has_work
  engine.feed(0, [7], 8)
  (turn,) = _next_turns(engine)
  assert turn.slot == 0 and turn.tokens.tolist() == [8, _STOP]


def test_a_server_that_fails_is_asked_again_but_not_for_ever(make_engine):
  engine, theirs = make_engine()
  engine.start(0, 1)
  theirs.fails = 2
  engine.feed(0, [1], 4)
  _next_turns(engine)
  assert len(theirs.asked) == 3
  theirs.fails = 9
  engine.feed(0, [1], 4)
  with pytest.raises(RuntimeError, match='failed 4 times: status 503'):
    _next_turns(engine)


def test_a_server_without_token_ids_is_refused(make_engine):
  engine, _ = make_engine(lambda tokens, log_probs: {'logprobs': None})
  engine.start(0, 1)
  engine.feed(0, [1], 4)
  with pytest.raises(errors.UserError, match='must answer with token ids'):
    _next_turns(engine)


def test_no_server_is_refused():
  with pytest.raises(errors.UserError, match=r'policy_url .*base URL'):
    remote_engine.RemoteEngine(
      'http://127.0.0.1:9/v1',
      num_slots=1,
      max_length=4,
      stop_tokens=(),
      temperature=1.0,
      timeout_s=1.0,
    )
