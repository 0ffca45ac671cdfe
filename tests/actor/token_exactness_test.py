"""The learner gets the tokens that were sampled, whatever their text says.

The tokeniser here has several ways to write the same text, as those of language
models do: what it encodes is the shortest one, what the policy samples is not.
"""

import numpy as np
import pytest
import turn_rig

from tunix_reverb.actor import permit_line
from tunix_reverb.actor import turn_loop
from tunix_reverb.environments import vector
from tunix_reverb.environments.tools import task
from tunix_reverb.environments.tools import tool
from tunix_reverb.environments.tools import tool_environment
from tunix_reverb.replay import test_utils
from tunix_reverb.replay import token_adder
from tunix_reverb.text import tokeniser

_NUM = 3
# 0 ends a turn, 1 calls the tool; the others are pieces of text.
_PIECES = ('', '', 'a', 'b', 'aa', 'ab', 'ba', 'bb', 'aaa', 'aab', 'aba', 'abb')
_PIECES += ('baa', 'bab', 'bba', 'bbb')


class _Merging(tokeniser.Tokeniser):
  """Takes the longest piece that fits."""

  @property
  def vocabulary_size(self):
    return len(_PIECES)

  @property
  def stop_tokens(self):
    return (0, 1)

  def encode(self, text):
    tokens = []
    while text:
      size = next(n for n in (3, 2, 1) if text[:n] in _PIECES[2:])
      tokens.append(_PIECES.index(text[:size]))
      text = text[size:]
    return tokens

  def decode(self, tokens):
    return ''.join('!' if t == 1 else _PIECES[t] for t in tokens)


class _Format(tokeniser.ChatFormat):
  call_marker = '!'

  @property
  def tokeniser(self):
    return _Merging()

  def text(self, turn):
    return self.tokeniser.decode(turn)

  def first(self, messages, tools):
    return self.following(messages, ended=True)

  def following(self, messages, *, ended):
    tokens = [] if ended else [0]
    for message in messages:
      tokens += self.tokeniser.encode(message['content'])
    return tokens


class _Echo(task.Task):
  """A tool says again what the policy said."""

  limits = character_limits = task.Limits(
    max_turns=3,
    max_turn_tokens=turn_rig.MAX_TURN,
    max_observation_tokens=13,
    max_tokens=turn_rig.MAX_LENGTH,
  )

  def start(self, generator):
    @tool.tool(timeout_s=None)
    def echo(text: str = '') -> str:
      """Says it again.

      Args:
        text: what to say.
      """
      return (text or 'a') + 'b'

    prompt = ''.join('ab'[i] for i in generator.integers(2, size=5))
    return task.Instance(
      messages=[{'role': 'user', 'content': prompt}],
      tools=[echo],
      score=lambda episode: 0.0,
    )


@pytest.fixture
def played():
  """(items, transcripts) of some episodes."""
  transcripts, writer = [], test_utils.ListWriter()
  environment = vector.SynchronousVectorEnvironment(
    [
      lambda i=i: tool_environment.make(
        _Echo(),
        chat_format=_Format(),
        seed=i,
        on_episode=transcripts.append,
      )
      for i in range(_NUM)
    ]
  )
  loop = turn_loop.TurnLoop(
    environment=environment,
    engine=turn_rig.make_engine(_NUM, _Merging().stop_tokens),
    adder=token_adder.TokenAdder(
      writer=writer, item_transitions=1, item_age_s=1e9
    ),
    variables=turn_rig.Variables(),
    variable_update_period_s=1e9,
    permits=permit_line.OwnPermits(),
    config=turn_loop.TurnConfig(
      max_turn_tokens=turn_rig.MAX_TURN, token_dtype=np.dtype(np.uint8), seed=0
    ),
  )
  assert loop.wait_for_variables(1.0)
  try:
    while len(writer.items) < 60:
      loop.step(0.0)
  finally:
    environment.close()
    loop.close()
  return writer.items, transcripts


def test_stored_are_the_tokens_of_the_transcripts_not_of_their_text(played):
  items, transcripts = played
  encoding, differ, calls = _Merging(), 0, 0
  assert len(items) == len(transcripts) == 60
  stored = sorted(item.observation.tolist() for item in items)
  exact = []
  for transcript in transcripts:
    tokens = list(transcript.prompt)
    for turn in transcript.turns:
      tokens += [*turn.tokens, *turn.observation]
      calls += len(turn.calls)
      text = [t for t in turn.tokens if t > 1]
      differ += encoding.encode(encoding.decode(text)) != text
    exact.append(tokens)
  assert stored == sorted(exact)
  # Encoded again, they would be others.
  assert differ > 15 and calls > 5
