"""What the processes of one learner agree on before each step.

Whether to stop, to report, to save or to publish depends on clocks, signals and
queues, which differ between processes; but all must take part in whatever uses
all devices. So each says what it would do, and all do what follows from that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from typing import Protocol

from tunix_reverb import errors
from tunix_reverb.sharding import processes


class Exchange(Protocol):
  """See `processes.Exchange`."""

  index: int
  size: int

  def __call__(self, words: processes.Words) -> list[processes.Words]: ...


class Group:
  """The processes of one learner; of a single one if it has no exchange.

  A single process is asked for its vote when the outcome is used. Several are
  asked whenever all of them call `agree`, and the outcome stands until then.

  Attributes:
    index: of this process; the first one publishes and reports.
    size: number of processes.
  """

  def __init__(self, exchange: Exchange | None = None):
    self._exchange = exchange
    self._votes: dict[str, Callable[[], int]] = {}
    self._outcome: list[processes.Words] = []
    self.index = 0 if exchange is None else exchange.index
    self.size = 1 if exchange is None else exchange.size

  def vote(self, name: str, of_this_process: Callable[[], int]) -> None:
    """Says how this process votes on `name`, from now on."""
    self._votes[name] = of_this_process

  def agree(self) -> None:
    """Asks all processes, which must call this in the same order.

    Raises:
      errors.PeerLostError: one did not call in time.
    """
    if self._exchange is not None:
      self._outcome = self._exchange(
        {name: int(vote()) for name, vote in self._votes.items()}
      )

  def all(self, name: str) -> list[int]:
    """The vote of every process, by index; 0 before any agreement."""
    if self._exchange is None:
      return [int(self._votes[name]())]
    return [words[name] for words in self._outcome] or [0] * self.size

  def others(self, name: str) -> list[int]:
    """The votes of all processes but this one."""
    votes = self.all(name)
    return votes[: self.index] + votes[self.index + 1 :]

  def first(self, name: str) -> int:
    """The vote of the first process, whose clock counts."""
    return self.all(name)[0]

  def any(self, name: str) -> bool:
    """Whether any process votes for it."""
    return any(self.all(name))

  @contextlib.contextmanager
  def computing(self) -> Iterator[None]:
    """Tells a failure of a collective from one of this process.

    Raises:
      errors.PeerLostError: instead of what JAX raises when a process is gone.
    """
    try:
      yield
    except RuntimeError as e:
      if self.size == 1 or isinstance(e, errors.PeerLostError):
        raise
      raise errors.PeerLostError(
        f'process {self.index} of {self.size} could not compute with the '
        f'others, of which one has died or cannot be reached: '
        f'{str(e).splitlines()[0]}'
      ) from e
