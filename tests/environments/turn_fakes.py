"""A format of conversations for tests: what is said, as bytes."""

from tunix_reverb.text import tokeniser


class Bytes(tokeniser.Tokeniser):
  """UTF-8, and 256 ends a turn."""

  vocabulary_size = 257
  stop_tokens = (256,)

  def encode(self, text):
    return list(text.encode())

  def decode(self, tokens):
    return bytes(t for t in tokens if t < 256).decode(errors='replace')


class Chat(tokeniser.ChatFormat):
  """role:content, one message a line."""

  tokeniser = Bytes()

  def first(self, messages, tools):
    return self.following(messages, ended=True)

  def following(self, messages, *, ended):
    text = ''.join(f'{m["role"]}:{m["content"]}\n' for m in messages)
    return ([] if ended else [256]) + self.tokeniser.encode(text)
