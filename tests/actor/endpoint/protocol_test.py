"""What requests may look like: anything."""

import json

import hypothesis
from hypothesis import strategies as st
import pytest

from tunix_reverb.actor.endpoint import protocol

_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=9), inner, max_size=3)
  ),
  max_leaves=8,
)
_MESSAGE = st.fixed_dictionaries(
  {'role': st.sampled_from(['system', 'user', 'assistant', 'tool'])},
  optional={
    'content': _JSON,
    'name': _JSON,
    'tool_call_id': _JSON,
    'tool_calls': st.lists(
      st.fixed_dictionaries(
        {},
        optional={
          'id': _JSON,
          'function': st.fixed_dictionaries(
            {}, optional={'name': _JSON, 'arguments': _JSON}
          )
          | _JSON,
        },
      ),
      max_size=2,
    )
    | _JSON,
  },
)
_BODY = st.fixed_dictionaries(
  {'messages': st.lists(_MESSAGE | _JSON, max_size=3) | _JSON},
  optional=dict.fromkeys(
    (
      'tools',
      'max_tokens',
      'stream',
      'stream_options',
      'n',
      'stop',
      'response_format',
      'logprobs',
    ),
    _JSON,
  ),
)


@hypothesis.given(_BODY | _JSON)
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_any_body_is_read_or_refused(values):
  try:
    request = protocol.parse(json.dumps(values).encode())
  except protocol.RequestError as e:
    assert 400 <= e.status < 500 and str(e)
    return
  for message in request.messages:
    assert isinstance(message['content'], str)
    # Its own form is the form in which it is compared.
    assert protocol.normalise(dict(message)) == message


@hypothesis.given(st.binary(max_size=60))
@hypothesis.settings(deadline=None, derandomize=True)
def test_any_bytes_are_read_or_refused(body):
  with pytest.raises(protocol.RequestError):
    protocol.parse(body)


@hypothesis.given(st.text(max_size=80), st.booleans())
@hypothesis.settings(max_examples=300, deadline=None, derandomize=True)
def test_what_is_streamed_is_a_beginning_of_the_answer(text, has_call):
  call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
  text = text + call * has_call
  tools = [{'type': 'function', 'function': {'name': 'a'}}]
  content, calls = protocol.read_turn(text, None, tools)
  assert bool(calls) == has_call or '<tool_call>' in text[: -len(call)]
  said = ''
  for size in range(len(text) + 1):
    shown = protocol.visible(text[:size], None, tools)
    if shown.startswith(said):
      said = shown
  assert content.startswith(said)
