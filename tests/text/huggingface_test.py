"""Tokenisers and chat templates of checkpoints, whole and turn by turn."""

import json

import pytest
import tiny_chat

from tunix_reverb import errors
from tunix_reverb.text import chat_template
from tunix_reverb.text import huggingface

pytest.importorskip('tokenizers', reason='tokenizers is missing')

_CHATML = tiny_chat.CHATML
# As Qwen3's: thinks, forgets earlier thinking, shows tools, tells results as
# the user's, and writes an empty thought into a last answer without one.
_THINKING = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1] %}
{%- if loop.index0 > ns.last and loop.last %}<|im_start|>assistant
<think>

</think>

{{ content }}<|im_end|>
{% else %}<|im_start|>assistant
{{ content }}<|im_end|>
{% endif %}
{%- elif message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_TOOL = {
  'type': 'function',
  'function': {'name': 'look_up', 'description': 'Looks up', 'parameters': {}},
}


def _write(path, template, *, special=('<|im_start|>', '<|im_end|>'), **config):
  """A checkpoint without a model."""
  tiny_chat.write_tokeniser(path, template, special)
  (path / 'config.json').write_text(json.dumps({'vocab_size': 320, **config}))
  return str(path)


def _text(chat, tokens):
  return chat.tokeniser.decode(tokens)


@pytest.mark.parametrize('template', [_CHATML, _THINKING])
def test_a_conversation_turn_by_turn_is_the_templates(template, tmp_path):
  chat = huggingface.open_format(_write(tmp_path / 'a', template))
  user = {'role': 'user', 'content': 'hello é 12'}
  later = {'role': 'user', 'content': 'go on'}
  tokens = chat.first([user], [])
  tokens += chat.turn('well, hello')
  tokens += chat.following([later], ended=True)
  whole = chat_template.ChatTemplate(template, special={}, where='a').render(
    [user, {'role': 'assistant', 'content': 'well, hello'}, later]
  )
  assert _text(chat, tokens) == whole
  assert chat.tokeniser.encode(whole) == tokens


def test_a_cut_turn_gets_its_stop_token(tmp_path):
  chat = huggingface.open_format(_write(tmp_path / 'a', _CHATML))
  tool = [{'role': 'tool', 'name': 'look_up', 'content': '3'}]
  ended = chat.following(tool, ended=True)
  assert chat.following(tool, ended=False) == [chat.stop_tokens[0], *ended]
  assert _text(chat, ended) == (
    '\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n'
  )


def test_what_the_policy_wrote_is_not_encoded_again(tmp_path):
  """A turn in other tokens than its text would be encoded to stays so."""
  chat = huggingface.open_format(_write(tmp_path / 'a', _CHATML))
  turn = [chat.tokeniser.encode(c)[0] for c in 'hello']
  assert chat.text(turn) == 'hello'
  assert chat.tokeniser.encode('hello') != turn
  assert not set(turn) & set(chat.following([], ended=True)[:1])


def test_thinking_stays_and_results_go_as_the_template_says(tmp_path):
  chat = huggingface.open_format(_write(tmp_path / 'a', _THINKING))
  following = chat.following([{'role': 'tool', 'content': '3'}], ended=True)
  assert _text(chat, following) == (
    '\n<|im_start|>user\n<tool_response>3</tool_response><|im_end|>\n'
    '<|im_start|>assistant\n'
  )


def test_stop_tokens_are_the_templates_and_the_checkpoints(tmp_path):
  path = _write(
    tmp_path / 'a',
    _CHATML,
    special=('<|im_start|>', '<|im_end|>', '<|end|>'),
    eos_token_id=2,
  )
  assert huggingface.open_format(path).stop_tokens == (1, 2)
  (tmp_path / 'a' / 'generation_config.json').write_text(
    '{"eos_token_id": [0, 1]}'
  )
  assert huggingface.open_format(path).stop_tokens == (1, 0)


def test_the_vocabulary_is_as_large_as_the_models(tmp_path):
  tokeniser = huggingface.open_format(_write(tmp_path / 'a', _CHATML)).tokeniser
  assert tokeniser.vocabulary_size == 320
  assert isinstance(tokeniser.decode(range(320)), str)


def test_tools_are_told_by_the_template_or_by_the_system_message(tmp_path):
  user = {'role': 'user', 'content': 'hello'}
  shown = huggingface.open_format(_write(tmp_path / 'a', _THINKING))
  text = _text(shown, shown.first([user], [_TOOL]))
  assert text.startswith('<|im_start|>system\n{"type": "function"')
  told = huggingface.open_format(_write(tmp_path / 'b', _CHATML))
  system = {'role': 'system', 'content': 'Be brief.'}
  text = _text(told, told.first([system, user], [_TOOL]))
  assert text.startswith('<|im_start|>system\nBe brief.\n\nYou may call')
  assert '"name": "look_up"' in text and '<tool_call>' in text


@pytest.mark.parametrize(
  ('template', 'words'),
  [
    ('{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}', 'leaves out'),
    (
      '{{ messages | length }}' + _CHATML,
      'changes what was before it .*ChatML',
    ),
    (_CHATML.replace('<|im_end|>', ''), 'no token that ends a turn'),
    ('{{ raise_exception("never") }}', 'refuses messages of user: never'),
    ('{% if %}', 'is not valid'),
    ('{{ messages.clear() }}' + _CHATML, 'refuses messages'),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 'refuses messages'),
    (None, 'must have a chat template'),
  ],
)
def test_a_template_that_does_not_fit_is_refused(template, words, tmp_path):
  path = _write(tmp_path / 'a', template)
  with pytest.raises(errors.UserError, match=words) as error:
    huggingface.open_format(path)
  assert path in str(error.value)


def test_what_is_no_tokeniser_is_refused(tmp_path):
  with pytest.raises(errors.UserError, match=r'with a tokenizer\.json'):
    huggingface.open_format(str(tmp_path))
  (tmp_path / 'tokenizer.json').write_text('{}')
  with pytest.raises(errors.UserError, match='cannot be read'):
    huggingface.open_format(str(tmp_path))


def test_saved_files_open_alike(tmp_path):
  path = _write(tmp_path / 'a', _CHATML, eos_token_id=1)
  (tmp_path / 'b').mkdir()
  huggingface.save_files(path, tmp_path / 'b')
  saved = huggingface.open_format(str(tmp_path / 'b'))
  messages = [{'role': 'user', 'content': 'hello'}]
  assert saved.first(messages, []) == huggingface.open_format(path).first(
    messages, []
  )
