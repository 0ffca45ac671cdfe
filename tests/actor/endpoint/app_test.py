"""The endpoint as OpenAI's own client sees it, and what the loop hears."""

from concurrent import futures
import json
import time

import httpx
import openai
import pytest

from tunix_reverb.actor.endpoint import app

_USER = {'role': 'user', 'content': 'hi'}
_TOOL = {
  'type': 'function',
  'function': {
    'name': 'look_up',
    'description': 'Looks up',
    'parameters': {'type': 'object', 'properties': {'key': {'type': 'string'}}},
  },
}
_CALL = '<tool_call>{"name": "look_up", "arguments": {"key": "a"}}</tool_call>'
_JSON = {'Content-Type': 'application/json'}
_FIRST, _MID, _LAST = 0, 1, 2


def _ask(client, messages, **kwargs):
  return client.chat.completions.create(
    model='tiny', messages=messages, **kwargs
  )


def _reward(rig, episode, **body):
  return httpx.post(
    f'{rig.url}/v1/episodes/{episode}/reward', json=body, timeout=10
  )


def _wait_until(condition):
  deadline_s = time.monotonic() + 10
  while not condition():
    assert time.monotonic() < deadline_s
    time.sleep(0.01)


def test_a_conversation_is_an_episode(make_rig):
  rig = make_rig('hello', 'bye')
  client = rig.client('a')
  first = _ask(client, [_USER])
  assert first.choices[0].message.content == 'hello'
  assert first.choices[0].finish_reason == 'stop'
  assert first.usage.completion_tokens == 6  # With the stop token.
  messages = [_USER, first.choices[0].message.model_dump(exclude_none=True)]
  more = {'role': 'user', 'content': [{'type': 'text', 'text': 'more'}]}
  second = _ask(client, [*messages, more])
  assert second.choices[0].message.content == 'bye'
  assert second.usage.prompt_tokens > first.usage.total_tokens
  answer = _reward(rig, 'a', reward=0.5)
  assert answer.status_code == 200
  assert answer.json() == {
    'episode_id': 'a',
    'segments': 1,
    'turns': 2,
    'tokens': second.usage.total_tokens,
  }
  _wait_until(lambda: len(rig.policy.heard) == 3)
  slot = rig.policy.heard[0][0]
  assert rig.policy.heard == [
    (slot, _FIRST, 0.0, 1.0, 'user:hi'),
    (slot, _MID, 0.0, 1.0, 'user:more'),
    (slot, _LAST, 0.5, 0.0, ''),
  ]
  assert rig.conversations.counts.segments_cut == 0


def test_a_truncated_episode_says_so(make_rig):
  rig = make_rig('hello')
  _ask(rig.client('a'), [_USER])
  _reward(rig, 'a', reward=1, truncated=True)
  _wait_until(lambda: len(rig.policy.heard) == 2)
  assert rig.policy.heard[1][1:4] == (_LAST, 1.0, 1.0)


@pytest.mark.parametrize('stream', [False, True])
def test_tools_are_called_and_their_results_go_on(make_rig, stream):
  rig = make_rig(f'Let me see. {_CALL}', 'It is 3.')
  client = rig.client('a')
  if stream:
    content, calls, reason = _streamed(_ask_stream(client, tools=[_TOOL]))
    call = calls[0]
    message = {'role': 'assistant', 'content': content, 'tool_calls': calls}
    name, arguments = call['function']['name'], call['function']['arguments']
  else:
    choice = _ask(client, [_USER], tools=[_TOOL]).choices[0]
    message = choice.message.model_dump(exclude_none=True)
    content, reason = choice.message.content, choice.finish_reason
    call = message['tool_calls'][0]
    name, arguments = call['function']['name'], call['function']['arguments']
  assert (content, reason) == ('Let me see.', 'tool_calls')
  assert name == 'look_up' and json.loads(arguments) == {'key': 'a'}
  result = {'role': 'tool', 'tool_call_id': call['id'], 'content': '3'}
  answer = _ask(client, [_USER, message, result], tools=[_TOOL])
  assert answer.choices[0].message.content == 'It is 3.'
  assert [heard[4] for heard in rig.policy.heard] == [
    'tools:look_upuser:hi',
    'tool:3',
  ]


def _ask_stream(client, **kwargs):
  return _ask(client, [_USER], stream=True, **kwargs)


def _streamed(chunks):
  """(content, tool calls, finish reason) put together as clients do."""
  content, calls, reason = '', [], None
  for chunk in chunks:
    for choice in chunk.choices:
      content += choice.delta.content or ''
      for call in choice.delta.tool_calls or []:
        calls.append(call.model_dump(exclude_none=True))
        del calls[-1]['index']
      reason = choice.finish_reason or reason
  return content, calls, reason


def test_malformed_calls_and_calls_without_tools_are_text(make_rig):
  rig = make_rig('<tool_call>{"name": }</tool_call>', _CALL)
  first = _ask(rig.client('a'), [_USER], tools=[_TOOL]).choices[0]
  assert first.message.content == '<tool_call>{"name": }</tool_call>'
  assert first.message.tool_calls is None and first.finish_reason == 'stop'
  second = _ask(rig.client('b'), [_USER]).choices[0]
  assert second.message.content == _CALL


def test_a_stream_comes_in_pieces_of_whole_characters(make_rig):
  rig = make_rig('naïve 你好')
  chunks = list(
    _ask_stream(
      rig.client('a'), stream_options={'include_usage': True}, logprobs=True
    )
  )
  deltas = [c.choices[0].delta.content for c in chunks if c.choices]
  assert ''.join(d or '' for d in deltas) == 'naïve 你好'
  assert len([d for d in deltas if d]) > 5
  assert '\ufffd' not in ''.join(d or '' for d in deltas)
  tokens = [
    entry
    for c in chunks
    if c.choices and c.choices[0].logprobs
    for entry in c.choices[0].logprobs.content
  ]
  assert len(tokens) == len('naïve 你好'.encode()) + 1
  assert chunks[-1].usage.completion_tokens == len(tokens)
  # What was streamed is what the conversation goes on from.
  said = {'role': 'assistant', 'content': 'naïve 你好'}
  _ask(rig.client('a'), [_USER, said, _USER])
  assert rig.conversations.counts.segments_cut == 0


def test_log_probs_are_those_of_the_tokens(make_rig):
  rig = make_rig('yes')
  choice = _ask(rig.client('a'), [_USER], logprobs=True).choices[0]
  assert [t.token for t in choice.logprobs.content] == ['y', 'e', 's', '']
  assert {t.logprob for t in choice.logprobs.content} == {-0.5}


def test_max_tokens_cuts_a_turn_and_the_next_goes_on(make_rig):
  rig = make_rig('a long answer', 'short')
  client = rig.client('a')
  choice = _ask(client, [_USER], max_tokens=6).choices[0]
  assert choice.finish_reason == 'length'
  assert choice.message.content == 'a long'
  said = {'role': 'assistant', 'content': 'a long'}
  _ask(client, [_USER, said, _USER])
  assert rig.policy.heard[1][4] == 'user:hi'
  assert rig.conversations.counts.segments_cut == 0


@pytest.mark.parametrize(
  'messages',
  [
    [_USER, {'role': 'assistant', 'content': 'Hello'}, _USER],
    [{'role': 'user', 'content': 'ho'}, _USER],
    [_USER],
  ],
  ids=['edited', 'another beginning', 'once more'],
)
def test_a_changed_conversation_begins_a_new_segment(make_rig, messages):
  rig = make_rig('hello')
  client = rig.client('a')
  _ask(client, [_USER])
  _ask(client, messages)
  answer = _reward(rig, 'a', reward=1.0)
  assert answer.json()['segments'] == 2
  _wait_until(lambda: len(rig.policy.heard) == 4)
  # The first segment is cut off, the second has the reward.
  assert sorted(h[1:4] for h in rig.policy.heard) == [
    (_FIRST, 0.0, 1.0),
    (_FIRST, 0.0, 1.0),
    (_LAST, 0.0, 1.0),
    (_LAST, 1.0, 0.0),
  ]
  assert rig.conversations.counts.segments_cut == 1


def test_many_agents_at_once(make_rig):
  rig = make_rig('hello', num_slots=2, slot_timeout_s=5.0)
  for number in range(6):
    name = f'episode {number}'
    _ask(rig.client(name), [_USER])
    assert _reward(rig, name, reward=number).status_code == 200
  _wait_until(lambda: len(rig.policy.heard) == 12)
  rewards = [h[2] for h in rig.policy.heard if h[1] == _LAST]
  assert sorted(rewards) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_without_a_free_slot_there_is_an_error_to_try_again(make_rig):
  rig = make_rig('hello', num_slots=1)
  _ask(rig.client('a'), [_USER])
  with pytest.raises(openai.InternalServerError, match='post rewards of those'):
    _ask(rig.client('b'), [_USER])
  _reward(rig, 'a', reward=0.0)
  _ask(rig.client('b'), [_USER])


def test_a_conversation_too_long_is_refused_and_may_be_rewarded(make_rig):
  rig = make_rig('hello', max_length=40)
  client = rig.client('a')
  _ask(client, [_USER])
  said = {'role': 'assistant', 'content': 'hello'}
  long = {'role': 'user', 'content': 30 * 'x'}
  with pytest.raises(openai.BadRequestError) as error:
    _ask(client, [_USER, said, long])
  assert error.value.code == 'context_length_exceeded'
  assert _reward(rig, 'a', reward=1.0).status_code == 200
  _wait_until(lambda: len(rig.policy.heard) == 2)
  assert rig.policy.heard[1][1:4] == (_LAST, 1.0, 1.0)


def test_episodes_that_nobody_ends_are_dropped(make_rig):
  rig = make_rig('hello', num_slots=1, idle_timeout_s=0.2, slot_timeout_s=5.0)
  _ask(rig.client('a'), [_USER])
  _ask(rig.client('b'), [_USER])  # Gets the slot when `a` is given up.
  assert rig.conversations.counts.abandoned == 1
  assert rig.sessions.failures['timeout'] == 1
  assert _reward(rig, 'a', reward=1.0).status_code == 404


def test_a_client_that_leaves_loses_the_trajectory_not_the_slot(make_rig):
  rig = make_rig('hello', num_slots=1, slot_timeout_s=5.0, turn_timeout_s=0.2)
  rig.policy.wait.clear()
  with pytest.raises(openai.InternalServerError, match='did not go on'):
    _ask(rig.client('a'), [_USER])
  rig.policy.wait.set()
  assert _ask(rig.client('a'), [_USER]).choices[0].message.content == 'hello'
  assert rig.conversations.counts.abandoned == 1


def test_rewards_that_cannot_be(make_rig):
  rig = make_rig('hello')
  assert _reward(rig, 'a', reward=1.0).status_code == 404
  _ask(rig.client('a'), [_USER])
  for reward in (None, 'much', True, float('1e999')):
    body = json.dumps({'reward': reward}).encode()
    answer = httpx.post(
      f'{rig.url}/v1/episodes/a/reward', content=body, headers=_JSON
    )
    assert answer.status_code == 400
  assert _reward(rig, 'a', reward=1.0).status_code == 200
  again = _reward(rig, 'a', reward=1.0)
  assert (again.status_code, again.json()['error']['code']) == (
    409,
    'episode_over',
  )


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    ({'n': 2}, r'n \(2\) must be 1'),
    ({'stop': ['x']}, 'stop .* must be'),
    ({'response_format': {'type': 'json_object'}}, 'response_format'),
    ({'logprobs': True, 'top_logprobs': 3}, 'top_logprobs'),
    ({'max_tokens': -1}, 'max_tokens'),
    ({'messages': []}, 'messages must be a list'),
    ({'messages': [{'role': 'robot', 'content': ''}]}, 'role of a message'),
    (
      {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
      'must be text',
    ),
  ],
)
def test_what_cannot_be_served_is_refused(make_rig, arguments, words):
  rig = make_rig('hello')
  arguments = {'model': 'tiny', 'messages': [_USER]} | arguments
  with pytest.raises(openai.BadRequestError, match=words):
    rig.client('a').chat.completions.create(**arguments)
  assert not rig.policy.heard


def test_an_episode_must_be_named_and_bodies_are_limited(make_rig, monkeypatch):
  rig = make_rig('hello')
  with pytest.raises(openai.BadRequestError, match='X-Episode-Id'):
    _ask(rig.client(None), [_USER])
  monkeypatch.setattr(app, '_MAX_BODY_BYTES', 1000)
  with pytest.raises(openai.APIStatusError) as error:
    _ask(rig.client('a'), [{'role': 'user', 'content': 2000 * 'x'}])
  assert error.value.status_code == 413
  url = f'{rig.url}/v1/chat/completions'
  assert httpx.post(url, content=b'{', headers=_JSON).status_code == 400
  assert httpx.post(url, content=b'{}').status_code == 415


def test_models_and_health(make_rig):
  rig = make_rig('hello')
  assert [model.id for model in rig.client('a').models.list()] == ['tiny']
  _ask(rig.client('a'), [_USER])
  assert httpx.get(f'{rig.url}/health').json()['turns'] == 1


def test_whoever_waits_is_told_that_the_endpoint_ends(make_rig):
  rig = make_rig('hello')
  rig.policy.wait.clear()
  with futures.ThreadPoolExecutor(1) as pool:
    asked = pool.submit(_ask, rig.client('a'), [_USER])
    _wait_until(lambda: rig.policy.heard)
    rig.endpoint.close()
    with pytest.raises(openai.InternalServerError) as error:
      asked.result(10)
  assert error.value.code == 'endpoint_closed'
  rig.policy.wait.set()
  with pytest.raises(openai.InternalServerError, match='endpoint ends'):
    _ask(rig.client('b'), [_USER])
