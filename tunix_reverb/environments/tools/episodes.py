"""Numbers for the episodes of one environment, over its replacements.

Environments of a group play the same instances as long as their numbers agree.
So a number is used up by the first turn of its episode: then its prompt has
been read. A reset that raises, or comes too late for anybody to read its
prompt, is made again by the next environment; an episode that fails is not.
"""

from __future__ import annotations


class Episodes:
  """0, 1, 2 ... for one environment at a time."""

  def __init__(self):
    self.next = 0
    self.holder: Hold | None = None

  def hold(self) -> Hold:
    """The end that an environment holds; the one before counts no more."""
    self.holder = Hold(self)
    return self.holder


class Hold:
  """One environment's end."""

  def __init__(self, episodes: Episodes):
    self._episodes = episodes

  def peek(self) -> int:
    """The next number."""
    return self._episodes.next

  def use(self, number: int) -> None:
    """Uses up `number` and those before."""
    if self._episodes.holder is self:
      self._episodes.next = number + 1
    # An environment that nobody listens to plays the same one again.
