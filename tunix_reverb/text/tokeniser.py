"""Between text and tokens: what turns of a conversation look like to a model.

Tokens in, tokens out: what the policy wrote is decoded for reading only, and
its own tokens are never encoded again.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

# As OpenAI's API has it: 'role' ('system', 'user', 'assistant' or 'tool'),
# 'content' (text), and of a tool's result its 'name'.
Message = Mapping[str, Any]
# {'type': 'function', 'function': {'name', 'description', 'parameters'}}
ToolSchema = Mapping[str, Any]


class Tokeniser(abc.ABC):
  """Text to tokens and back."""

  @property
  @abc.abstractmethod
  def vocabulary_size(self) -> int:
    """Tokens are 0..vocabulary_size - 1."""

  @property
  @abc.abstractmethod
  def stop_tokens(self) -> tuple[int, ...]:
    """Any of them ends a turn."""

  @abc.abstractmethod
  def encode(self, text: str) -> list[int]:
    """The tokens of `text`; none are added before or after."""

  @abc.abstractmethod
  def decode(self, tokens: Sequence[int]) -> str:
    """The text of `tokens`; never raises for tokens of the vocabulary."""


class ChatFormat(abc.ABC):
  """How one family of models writes a conversation.

  Attributes:
    call_marker: text at the end of a turn that makes a tool call of it, whose
      argument is what stands before. None where the policy writes calls as
      `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
  """

  call_marker: str | None = None

  @property
  @abc.abstractmethod
  def tokeniser(self) -> Tokeniser:
    """What the model reads and writes with."""

  @property
  def stop_tokens(self) -> tuple[int, ...]:
    """Any of them ends a turn; the first is what a scripted turn ends with."""
    return self.tokeniser.stop_tokens

  @abc.abstractmethod
  def first(
    self, messages: Sequence[Message], tools: Sequence[ToolSchema]
  ) -> list[int]:
    """The tokens of a conversation's beginning.

    They end with the header after which the assistant writes.
    """

  @abc.abstractmethod
  def following(self, messages: Sequence[Message], *, ended: bool) -> list[int]:
    """The tokens from one turn of the assistant to its next.

    Args:
      messages: what others say in between; may be empty.
      ended: whether the turn ended with a stop token. If not, the tokens begin
        with one.
    """

  def text(self, turn: Sequence[int]) -> str:
    """What a turn says, the stop token that ends it left out."""
    turn = list(turn)
    if turn and turn[-1] in self.stop_tokens:
      turn.pop()
    return self.tokeniser.decode(turn)

  def turn(self, text: str) -> list[int]:
    """The tokens of a turn that a scripted policy writes, stop token last."""
    return [*self.tokeniser.encode(text), self.stop_tokens[0]]
