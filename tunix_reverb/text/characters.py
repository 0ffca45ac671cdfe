"""Sixteen tokens for models that learn from nothing.

  0 END      .  ends what anybody says, the policy's turn, too
  1 CALL     !  ends a turn that calls the tool; what stands before it is the
                call's argument, often nothing
  2 RESULT   =  begins what a tool answered
  3 UNKNOWN  ?  for any run of characters outside the alphabet
  4..15         the alphabet: 0 1 2 3 4 5 6 7 8 9 + -

A look-up, whole, as it is decoded: 47. ! =39. 39. (without the spaces, which
show who writes).
"""

from __future__ import annotations

from collections.abc import Sequence
import re

from tunix_reverb.text import tokeniser as tokeniser_lib

END, CALL, RESULT, UNKNOWN = range(4)
ALPHABET = '0123456789+-'
CALL_MARKER = '!'
_CHARACTERS = f'.{CALL_MARKER}=?{ALPHABET}'
_TOKENS = {c: _CHARACTERS.index(c) for c in ALPHABET}
_PIECES = re.compile(f'[{re.escape(ALPHABET)}]|[^{re.escape(ALPHABET)}]+')


class CharacterTokeniser(tokeniser_lib.Tokeniser):
  """One token for each character; see the module's docstring."""

  @property
  def vocabulary_size(self) -> int:
    return len(_CHARACTERS)

  @property
  def stop_tokens(self) -> tuple[int, ...]:
    return END, CALL

  def encode(self, text: str) -> list[int]:
    return [_TOKENS.get(piece, UNKNOWN) for piece in _PIECES.findall(text)]

  def decode(self, tokens: Sequence[int]) -> str:
    return ''.join(_CHARACTERS[token] for token in tokens)


class CharacterFormat(tokeniser_lib.ChatFormat):
  """Conversations of characters.

  What the system says, and the schemas of the tools, are left out: a model
  from scratch learns what to do from the reward alone.
  """

  call_marker = CALL_MARKER

  def __init__(self):
    self._tokeniser = CharacterTokeniser()

  @property
  def tokeniser(self) -> CharacterTokeniser:
    return self._tokeniser

  def first(
    self,
    messages: Sequence[tokeniser_lib.Message],
    tools: Sequence[tokeniser_lib.ToolSchema],
  ) -> list[int]:
    return self.following(messages, ended=True)

  def following(
    self, messages: Sequence[tokeniser_lib.Message], *, ended: bool
  ) -> list[int]:
    tokens = [] if ended else [END]
    for message in messages:
      if message['role'] == 'system':
        continue
      tokens += [RESULT] if message['role'] == 'tool' else []
      tokens += [*self._tokeniser.encode(message['content']), END]
    return tokens

  def text(self, turn: Sequence[int]) -> str:
    turn = list(turn)
    if turn and turn[-1] == END:
      turn.pop()
    return self._tokeniser.decode(turn)

  def turn(self, text: str) -> list[int]:
    argument = text.removesuffix(CALL_MARKER)
    last = END if argument == text else CALL
    return [*self._tokeniser.encode(argument), last]
