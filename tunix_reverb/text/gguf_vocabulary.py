"""The tokeniser of a GGUF file: byte-level BPE from its vocabulary and merges.

How text is cut before the merges is a name in the file (`tokenizer.ggml.pre`),
not a rule; the rules of the names that our families use are here, after
llama.cpp's `llama-vocab.cpp` and the `tokenizer.json` of the models themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunix_reverb import errors
from tunix_reverb.text import gguf_metadata

_MODEL = 'gpt2'  # llama.cpp's name of byte-level BPE.
# llama.cpp's types of tokens that are never merged from text.
_CONTROL, _USER_DEFINED = 3, 4
_WORDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
_REST = ' ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+'
_SPLITS: Mapping[str, str] = {
  'llama-bpe': f'{_WORDS}\\p{{N}}{{1,3}}|{_REST}',
  'qwen2': f'{_WORDS}\\p{{N}}|{_REST}',
}
# GPT-2's own rule, with and without digits one by one.
_PLAIN = ('gpt-2', 'default')
_DIGITS = ('smollm',)


def make_tokenizer(reader: Any, where: str) -> Any:
  """A `tokenizers.Tokenizer` of the file's vocabulary.

  Args:
    reader: of the file.
    where: named in errors.

  Raises:
    errors.UserError: another kind of vocabulary.
  """
  import tokenizers
  from tokenizers import decoders
  from tokenizers import models
  from tokenizers import normalizers

  get = lambda name, default=None: gguf_metadata.field(
    reader, f'tokenizer.ggml.{name}', default
  )
  if get('model') != _MODEL:
    raise errors.UserError(
      f'{where}: tokenizer.ggml.model ({get("model")!r}) must be {_MODEL}; '
      'use the directory of safetensors that the file was made from'
    )
  words, pre = get('tokens'), get('pre', 'default')
  merges = [tuple(merge.split(' ', 1)) for merge in get('merges', [])]
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      {word: i for i, word in enumerate(words)},
      merges,
      # Llama 3 takes a word that is in the vocabulary as it is.
      ignore_merges=pre == 'llama-bpe',
    )
  )
  tokenizer.pre_tokenizer = _pre_tokenizer(pre, where)
  tokenizer.decoder = decoders.ByteLevel()
  if pre == 'qwen2':
    tokenizer.normalizer = normalizers.NFC()
  added = {_CONTROL: True, _USER_DEFINED: False}
  tokenizer.add_tokens(
    [
      tokenizers.AddedToken(word, special=added[kind], normalized=False)
      for word, kind in zip(words, get('token_type', []))
      if kind in added
    ]
  )
  return tokenizer


def settings(reader: Any) -> dict[str, Any]:
  """What tokenizer_config.json would hold of it."""
  words = gguf_metadata.field(reader, 'tokenizer.ggml.tokens')
  found = {'tokenizer_class': 'PreTrainedTokenizerFast'}
  for name in ('bos', 'eos', 'padding', 'unknown'):
    token = gguf_metadata.field(reader, f'tokenizer.ggml.{name}_token_id')
    if token is not None:
      key = {'padding': 'pad', 'unknown': 'unk'}.get(name, name)
      found[f'{key}_token'] = words[token]
  template = gguf_metadata.field(reader, 'tokenizer.chat_template')
  if template:
    found['chat_template'] = template
  return found


def _pre_tokenizer(pre: str, where: str) -> Any:
  from tokenizers import pre_tokenizers
  from tokenizers import Regex

  if pre in _SPLITS:
    return pre_tokenizers.Sequence(
      [
        pre_tokenizers.Split(Regex(_SPLITS[pre]), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
    )
  plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
  if pre in _DIGITS:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, plain])
  if pre in _PLAIN:
    return plain
  raise errors.UserError(
    f'{where}: tokenizer.ggml.pre ({pre!r}) must be one of '
    f'{", ".join([*_SPLITS, *_DIGITS, *_PLAIN])}; use the directory of '
    'safetensors that the file was made from'
  )
