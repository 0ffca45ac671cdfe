"""A chat format of bytes, and a policy that says what it is told to say."""

import threading

import dm_env

from tunix_reverb.text import tokeniser

START, STOP = 256, 257
VOCABULARY = 258


class ByteTokeniser(tokeniser.Tokeniser):
  vocabulary_size = VOCABULARY
  stop_tokens = (STOP,)

  def encode(self, text):
    return list(text.encode())

  def decode(self, tokens):
    return bytes(t for t in tokens if t < START).decode('utf-8', 'replace')


class ByteFormat(tokeniser.ChatFormat):
  """START role : content STOP, as often as there are messages."""

  tokeniser = ByteTokeniser()

  def first(self, messages, tools):
    told = [{'role': 'tools', 'content': t['function']['name']} for t in tools]
    return self.following([*told, *messages], ended=True)

  def following(self, messages, *, ended):
    tokens = [] if ended else [STOP]
    for message in messages:
      text = f'{message["role"]}:{message["content"]}'
      tokens += [START, *self.tokeniser.encode(text), STOP]
    return [*tokens, START]


class ScriptedPolicy:
  """Stands for the actor's loop, in a thread.

  Attributes:
    heard: (slot, step type, reward, discount, text) of every timestep.
    says: turns to come, as tokens; the last one is said again and again.
  """

  def __init__(self, sessions, *says):
    self.heard = []
    self.says = [list(turn) for turn in says]
    self.wait = threading.Event()
    self.wait.set()
    self._sessions = sessions
    self._is_over = False
    self._thread = threading.Thread(target=self._run)
    self._thread.start()

  def close(self):
    self._is_over = True
    self.wait.set()
    self._thread.join(5)

  def _run(self):
    while not self._is_over:
      said = self._sessions.recv(0.02)
      if said is None:
        continue
      ids, timestep = said
      for row, slot in enumerate(ids.tolist()):
        self._answer(slot, *(column[row] for column in timestep))

  def _answer(self, slot, step_type, reward, discount, observation):
    tokens = [t for t in observation.tolist() if t >= 0]
    text = ByteTokeniser().decode(tokens)
    self.heard.append((slot, int(step_type), float(reward), discount, text))
    if step_type != dm_env.StepType.LAST:
      self.wait.wait(10)
      turn = self.says.pop(0) if len(self.says) > 1 else self.says[0]
      most = self._sessions.max_new_tokens(slot)
      turn = turn[:most]
      for size in range(1, len(turn)):
        self._sessions.hear(slot, turn[:size], [-0.5] * size, False)
      self._sessions.hear(slot, turn, [-0.5] * len(turn), True)
    self._sessions.send(None, _Ids([slot]))


class _Ids(list):
  def tolist(self):
    return list(self)


def turn(text):
  return [*text.encode(), STOP]
