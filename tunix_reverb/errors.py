"""Exceptions that a caller of this library would catch.

Everything a user got wrong is a `ValueError`; `UserError` marks those that a
binary prints as one line, without a traceback, before it exits with status 2.
"""


class UserError(ValueError):
  """A mistake in flags, configuration, files or ports, told in one line."""


class MissingExtraError(UserError):
  """An optional dependency is absent; the message names the extra."""


class SpecMismatchError(UserError):
  """A role's specs or limits differ from those the replay server serves."""


class CheckpointError(UserError):
  """No loadable checkpoint was found where one was asked for."""


class DeadlineExceededError(TimeoutError):
  """A named wait did not end in time; the message says who waits on whom."""


class NonFiniteError(RuntimeError):
  """Too many updates in a row had non-finite loss or gradients."""


class ReplayUnavailableError(RuntimeError):
  """The replay server stopped answering within its deadline."""


class PoisonItemError(ValueError):
  """An item from a replay server that cannot be read.

  Attributes:
    key: of the item, by which it can be deleted; None if that is not known.
  """

  def __init__(self, message: str, *, key: int | None):
    """Args: message: names the item and what is wrong. key: of the item."""
    super().__init__(message)
    self.key = key


class PeerLostError(RuntimeError):
  """Another process of the learner died or did not answer in time."""
