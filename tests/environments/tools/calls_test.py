"""Tool calls in text: both forms, and anything at all."""

import json

import hypothesis
from hypothesis import strategies as st
import pytest

from tunix_reverb.environments.tools import calls


def test_calls_among_text():
  parsed = calls.parse(
    'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    '</tool_call> and <tool_call>{"name": "now"}</tool_call>'
  )
  assert parsed.calls == (
    calls.Call('add', {'a': 1}),
    calls.Call('now', {}),
  )
  assert parsed.content == 'Let me see.  and'
  assert parsed.errors == ()


def test_text_without_calls_is_content():
  assert calls.parse(' 42 ') == calls.Parsed('42')


@pytest.mark.parametrize(
  'body,words',
  [
    ('{"name": "add", "arguments": {"a": 1}', 'must be JSON: Expecting'),
    ('add(1, 2)', 'tool call (add(1, 2)) must be JSON'),
    ('["add"]', 'must be an object with a "name"'),
    ('{"arguments": {}}', 'must be an object with a "name"'),
    ('{"name": 3}', 'must be an object with a "name"'),
    ('{"name": "add", "arguments": [1]}', 'arguments of add must be an object'),
    ('{"name": "add", "arguments": {"a": NaN}}', 'NaN is no JSON number'),
    ('[' * 100_000, 'must be JSON of at most 50 levels'),
    ('[' * 51 + ']' * 51, 'must be JSON of at most 50 levels'),
    ('{"name": "add", "arguments": {"a": ' + '1' * 9999 + '}}', 'must be JSON'),
  ],
)
def test_what_cannot_be_read_is_told(body, words):
  parsed = calls.parse(f'x <tool_call>{body}</tool_call> y')
  assert parsed.calls == ()
  [error] = parsed.errors
  assert words in error
  assert len(error) < 250
  assert parsed.content == 'x  y'


def test_a_call_that_is_cut_off_is_told():
  parsed = calls.parse('<tool_call>{"name": "add", "argu')
  assert parsed == calls.Parsed(
    '', (), ('a tool call must end with </tool_call>',)
  )


def test_one_bad_call_does_not_hide_the_next():
  parsed = calls.parse(
    '<tool_call>oops</tool_call><tool_call>{"name": "add"}</tool_call>'
  )
  assert len(parsed.errors) == 1
  assert parsed.calls == (calls.Call('add', {}),)


def test_the_marker_makes_a_call_of_what_stands_before():
  assert calls.parse('1+2!', '!').calls == (calls.Call(None, '1+2'),)
  assert calls.parse('!', '!').calls == (calls.Call(None, ''),)
  assert calls.parse('1+2', '!') == calls.Parsed('1+2')
  assert calls.parse('1!2', '!') == calls.Parsed('1!2')


_PIECES = st.lists(
  st.one_of(
    st.text(st.characters(), max_size=20),
    st.sampled_from(
      ['<tool_call>', '</tool_call>', '{', '}', '"name"', ':', '!', '```']
    ),
  ),
  max_size=12,
).map(''.join)


@hypothesis.given(text=_PIECES, marker=st.sampled_from([None, '!']))
@hypothesis.settings(deadline=None)
def test_nothing_raises(text, marker):
  parsed = calls.parse(text, marker)
  assert all(isinstance(call, calls.Call) for call in parsed.calls)
  assert (
    text.count('<tool_call>') >= len(parsed.calls + parsed.errors) or marker
  )
  calls.python_block(text)


_JSON = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-(10**9), 10**9)
  | st.floats(allow_nan=False, allow_infinity=False)
  | st.text().filter(lambda t: 'tool_call>' not in t),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=8,
)


@hypothesis.given(
  name=st.text(st.characters(categories=['L', 'N']), min_size=1),
  arguments=st.dictionaries(
    st.text().filter(lambda t: 'tool_call>' not in t), _JSON, max_size=3
  ),
)
@hypothesis.settings(deadline=None)
def test_what_is_rendered_is_read_back(name, arguments):
  call = calls.Call(name, arguments)
  text = calls.render(call)
  hypothesis.assume(text.count('tool_call>') == 2)
  assert calls.parse(f'so {text}') == calls.Parsed('so', (call,))
  assert json.loads(json.dumps(arguments)) == arguments


def test_rendering_with_the_marker_keeps_the_first_value():
  call = calls.Call('calculate', {'expression': '1+2'})
  assert calls.render(call, '!') == '1+2!'
  assert calls.render(calls.Call('lookup', {}), '!') == '!'


def test_the_last_python_block_counts():
  text = 'a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\n'
  assert calls.python_block(text) == 'x = 2\n'
  assert calls.python_block('```\ny\n```') == 'y\n'
  assert calls.python_block('```python\nx = 1') is None
