"""Numbers for the episodes of one environment, over its replacements.

Environments of a group play the same instances as long as their numbers agree.
So a number is used up when its episode starts, and only then: a reset that
raises is tried again by the next environment, an episode that fails is not,
and an environment that was given up and wakes up late takes none.
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
