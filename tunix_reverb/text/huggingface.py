"""The tokeniser and the conversations of a pretrained model.

`open_format` reads them from the checkpoint: a directory with tokenizer.json,
or a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import json
import pathlib
from typing import Any

from tunix_reverb import errors
from tunix_reverb.text import chat_template
from tunix_reverb.text import gguf_metadata
from tunix_reverb.text import gguf_vocabulary
from tunix_reverb.text import tokeniser as tokeniser_lib

_VOCABULARY = 'tokenizer.json'
_SETTINGS = 'tokenizer_config.json'
_TEMPLATE = 'chat_template.jinja'
_GENERATION = 'generation_config.json'
_MODEL = 'config.json'
# Special tokens that templates name.
_SPECIAL = ('bos_token', 'eos_token', 'pad_token', 'unk_token')
# A conversation in which to look for what stands after an answer.
_QUESTION = ({'role': 'user', 'content': 'Hello'},)
_ANSWER = 'Tunixanswer'
_FOLLOWING = (
  ({'role': 'user', 'content': 'Go on'},),
  ({'role': 'tool', 'name': 'look_up', 'content': '3'},),
)


class HuggingFaceTokeniser(tokeniser_lib.Tokeniser):
  """A tokeniser of the `tokenizers` library.

  Special tokens that stand in a text are taken for what they say, as chat
  templates need it; so they are in a tool's result.
  """

  def __init__(
    self, tokenizer: Any, *, vocabulary_size: int, stop_tokens: Sequence[int]
  ):
    """Wraps it.

    Args:
      tokenizer: `tokenizers.Tokenizer`.
      vocabulary_size: of the model, which may have room for more tokens than
        the tokeniser has.
      stop_tokens: any of them ends a turn.
    """
    self._tokenizer = tokenizer
    self._vocabulary_size = vocabulary_size
    self._stop_tokens = tuple(stop_tokens)

  @property
  def vocabulary_size(self) -> int:
    return self._vocabulary_size

  @property
  def stop_tokens(self) -> tuple[int, ...]:
    return self._stop_tokens

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, tokens: Sequence[int]) -> str:
    return self._tokenizer.decode(
      [int(token) for token in tokens], skip_special_tokens=False
    )


class TemplateFormat(tokeniser_lib.ChatFormat):
  """Conversations as a chat template writes them, one turn after the other.

  What stands between an answer and the next one is taken from the template's
  rendering of a short conversation, so that no answer is ever rendered: what
  the policy wrote stays as it wrote it. A template that takes away earlier
  thinking (Qwen3's, once the user speaks again) is followed in what it adds
  only.
  """

  def __init__(
    self,
    tokenizer: Any,
    template: chat_template.ChatTemplate,
    *,
    vocabulary_size: int,
    stop_tokens: Sequence[int],
    where: str,
  ):
    """Finds out how the template ends a turn.

    Args:
      tokenizer: `tokenizers.Tokenizer`.
      template: of the same checkpoint.
      vocabulary_size: of the model.
      stop_tokens: that the checkpoint names; the template's own comes first.
      where: both come from; named in errors.

    Raises:
      errors.UserError: what comes after a turn cannot be appended to it.
    """
    self._template = template
    self._where = where
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    first = encode(self._after(()))[:1]
    stops = tuple(dict.fromkeys([*first, *stop_tokens]))
    self._tokeniser = HuggingFaceTokeniser(
      tokenizer, vocabulary_size=vocabulary_size, stop_tokens=stops
    )
    for messages in _FOLLOWING:
      if encode(self._after(messages))[:1] != first:
        raise self._not_append_only('ends its turns in several ways')
    if not first or not _is_added(tokenizer, first[0]):
      raise self._not_append_only('has no token that ends a turn')

  @property
  def tokeniser(self) -> HuggingFaceTokeniser:
    return self._tokeniser

  def first(
    self,
    messages: Sequence[tokeniser_lib.Message],
    tools: Sequence[tokeniser_lib.ToolSchema],
  ) -> list[int]:
    return self._tokeniser.encode(self._template.render(messages, tools))

  def following(
    self, messages: Sequence[tokeniser_lib.Message], *, ended: bool
  ) -> list[int]:
    # Encoded with its stop token, or a tokeniser that marks the beginning of a
    # text would mark this one.
    tokens = self._tokeniser.encode(self._after(messages))
    return tokens[1:] if ended else tokens

  def _after(self, messages: Sequence[tokeniser_lib.Message]) -> str:
    """What the template writes after an answer, its stop token first."""
    answer = {'role': 'assistant', 'content': _ANSWER}
    head, found, rest = self._template.render(
      [*_QUESTION, answer, *messages]
    ).partition(_ANSWER)
    if not found:
      raise self._not_append_only('leaves out what the assistant says')
    # An answer without successor may be rendered otherwise: it is never so
    # that another turn comes right after it.
    if messages and head != self._template.render(_QUESTION):
      raise self._not_append_only(f'changes what was before it ({head!r})')
    return rest

  def _not_append_only(self, problem: str) -> errors.UserError:
    return errors.UserError(
      f'chat template of {self._where} {problem}: turns cannot be appended to '
      'each other. Put one that only appends into its '
      f'{_TEMPLATE}, such as ChatML'
    )


def open_format(name: str) -> TemplateFormat:
  """The tokeniser and conversations of a checkpoint.

  Args:
    name: path of a directory of Hugging Face's, or of a GGUF file.

  Raises:
    errors.UserError: it holds none that can be used.
    errors.MissingExtraError: a package is absent.
  """
  path = pathlib.Path(name)
  try:
    import jinja2  # noqa: F401
    import tokenizers  # noqa: F401
  except ImportError as e:
    raise errors.MissingExtraError(
      f'model ({name}) needs the package {e.name}: install the extra agents'
    ) from e
  if path.is_file():
    reader = gguf_metadata.open_reader(path)
    tokenizer = gguf_vocabulary.make_tokenizer(reader, name)
    settings = gguf_vocabulary.settings(reader)
    vocabulary_size = tokenizer.get_vocab_size()
    named = gguf_metadata.field(reader, 'tokenizer.ggml.eos_token_id')
  else:
    tokenizer = _read_tokenizer(path)
    settings = _read_settings(path)
    model = _read_json(path / _MODEL)
    vocabulary_size = max(
      model.get('vocab_size', 0), tokenizer.get_vocab_size()
    )
    named = _read_json(path / _GENERATION).get(
      'eos_token_id', model.get('eos_token_id')
    )
  return _make_format(
    tokenizer, settings, vocabulary_size, _as_list(named), name
  )


def save_files(name: str, directory: pathlib.Path) -> None:
  """Writes the tokeniser of a checkpoint into a directory.

  Args:
    name: see `open_format`.
    directory: exists.

  Raises:
    errors.UserError: see `open_format`.
  """
  path = pathlib.Path(name)
  if path.is_file():
    reader = gguf_metadata.open_reader(path)
    tokenizer = gguf_vocabulary.make_tokenizer(reader, name)
    tokenizer.save(str(directory / _VOCABULARY))
    (directory / _SETTINGS).write_text(
      json.dumps(gguf_vocabulary.settings(reader), indent=2) + '\n',
      encoding='utf-8',
    )
    return
  for file in (
    _VOCABULARY,
    _SETTINGS,
    _TEMPLATE,
    _GENERATION,
    'special_tokens_map.json',
    'vocab.json',
    'merges.txt',
  ):
    if (path / file).is_file():
      (directory / file).write_bytes((path / file).read_bytes())


def _make_format(
  tokenizer: Any,
  settings: Mapping[str, Any],
  vocabulary_size: int,
  stop_tokens: list[int],
  where: str,
) -> TemplateFormat:
  special = {
    key: _text_of(settings[key]) for key in _SPECIAL if settings.get(key)
  }
  eos = tokenizer.token_to_id(special.get('eos_token', ''))
  template = settings.get('chat_template')
  if isinstance(template, list):  # Several, by name.
    by_name = {entry['name']: entry['template'] for entry in template}
    template = by_name.get('tool_use', by_name.get('default'))
  if not template:
    raise errors.UserError(
      f'model ({where}) must have a chat template: put one into its '
      f'{_TEMPLATE}, such as ChatML'
    )
  return TemplateFormat(
    tokenizer,
    chat_template.ChatTemplate(template, special=special, where=where),
    vocabulary_size=vocabulary_size,
    stop_tokens=[*stop_tokens, *([] if eos is None else [eos])],
    where=where,
  )


def _read_tokenizer(path: pathlib.Path) -> Any:
  import tokenizers

  file = path / _VOCABULARY
  if not file.is_file():
    raise errors.UserError(
      f'model ({path}) must be a directory with a {_VOCABULARY}, or a GGUF '
      'file; save the tokeniser as a fast one'
    )
  try:
    return tokenizers.Tokenizer.from_file(str(file))
  # The library raises bare exceptions.
  except Exception as e:  # pylint: disable=broad-exception-caught
    raise errors.UserError(f'{file} cannot be read: {e}') from e


def _read_settings(path: pathlib.Path) -> dict[str, Any]:
  settings = _read_json(path / _SETTINGS)
  if (path / _TEMPLATE).is_file():
    settings['chat_template'] = (path / _TEMPLATE).read_text(encoding='utf-8')
  return settings


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """A JSON object; an empty one if there is no such file."""
  if not path.is_file():
    return {}
  try:
    values = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as e:
    raise errors.UserError(f'{path} is not JSON: {e}') from e
  if not isinstance(values, dict):
    raise errors.UserError(f'{path} must hold a JSON object')
  return values


def _as_list(tokens: Any) -> list[int]:
  if tokens is None:
    return []
  return list(tokens) if isinstance(tokens, (list, tuple)) else [int(tokens)]


def _text_of(token: Any) -> str:
  """Of a special token, which may be described instead of written."""
  return token['content'] if isinstance(token, dict) else str(token)


def _is_added(tokenizer: Any, token: int) -> bool:
  """Whether text is never merged into this token."""
  return token in tokenizer.get_added_tokens_decoder()
