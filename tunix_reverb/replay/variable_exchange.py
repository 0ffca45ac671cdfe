"""Variables through a one-item table of the replay server, for either client.

The sink publishes and the source fetches, each in a thread of its own; a reader
takes an item whole or not at all, and compares its checksum. How items get to
the server and back is the client's: its `Transport`.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
import logging
import math
import pathlib
import secrets
import threading
import time

import numpy as np

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb import variables as variables_lib
from tunix_reverb.replay import health as health_lib
from tunix_reverb.replay import publications
from tunix_reverb.replay import tables

_CHUNK_BYTES = 16 << 20
_INLINE_BYTES = 200 << 20

# How often an idle sink looks whether a restarted server lost the variables.
_CHECK_PERIOD_S = 2.0
_RETRY_S = 0.2
_MAX_RETRY_S = 2.0


class Transport(abc.ABC):
  """A client's way to the tables; one thread at a time.

  Every method raises `errors.ReplayUnavailableError` when the server does not
  answer or refuses, and may be called again then.
  """

  @abc.abstractmethod
  def insert(
    self, timesteps: Sequence[Sequence[np.ndarray]], version: int
  ) -> None:
    """Inserts an item, and then `version` into the table of versions.

    Returns when the server has confirmed both.

    Args:
      timesteps: of each, arrays in the order of `publications.COLUMNS`.
      version: the priority of both items.
    """

  @abc.abstractmethod
  def state(self) -> tables.LimiterState:
    """The state of the table of variables."""

  @abc.abstractmethod
  def fetch(self) -> list[np.ndarray]:
    """Columns of the item, [num_timesteps, ...] each.

    Raises:
      ValueError: they cannot be read.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Ends a call under way, if the client can."""


class VariableSink(core.VariableSink):
  """Publishes variables into the table of one server.

  A daemon thread talks to the server. It publishes the newest variables again
  when the server has lost them, as after a restart without a checkpoint.
  """

  def __init__(
    self,
    address: str,
    transport: Transport,
    *,
    directory: pathlib.Path | None = None,
    inline_bytes: int = _INLINE_BYTES,
    chunk_bytes: int = _CHUNK_BYTES,
  ):
    """Starts the sink; returns at once, whether the server is up or not.

    Args:
      address: 'host:port' of the server.
      transport: to it; closed with the sink.
      directory: for variables above `inline_bytes`, on storage that every
        role sees; None refuses them.
      inline_bytes: most bytes sent through the table.
      chunk_bytes: bytes per chunk.
    """
    self._address = address
    self._transport = transport
    self._directory = directory
    self._inline_bytes = inline_bytes
    self._chunk_bytes = chunk_bytes
    # Tells a restarted learner, whose versions may go back, from a server
    # that came back with an old item.
    self._publisher = secrets.randbits(63)
    self._changed = threading.Condition()
    self._newest: tuple[int, publications.Publication] | None = None
    self._version = -1
    self._published_version = -1
    self._error: str | None = None
    self._closed = False
    self._thread = threading.Thread(
      target=self._run, daemon=True, name=f'variables to {address}'
    )
    self._thread.start()

  @property
  def confirmed_version(self) -> int:
    """See base class."""
    return max(0, self._published_version)

  def publish(self, variables: types.Variables, timeout_s: float) -> None:
    """See `core.VariableSink`.

    After a deadline the sink keeps trying until newer variables come.

    Raises:
      ValueError: the version is not above the last one, or the variables are
        too large and there is no directory for them.
    """
    version = variables.policy_version
    deadline_s = time.monotonic() + timeout_s
    if version <= self._version:
      raise ValueError(
        f'policy_version ({version}) must be above that of the previous '
        f'publish ({self._version})'
      )
    payload = variables_lib.encode(variables)
    if payload.size > self._inline_bytes:
      payload = self._write_file(payload, version)
    with self._changed:
      self._version = version
      self._newest = (
        version,
        publications.Publication(payload, self._publisher, time.time()),
      )
      self._changed.notify_all()
      self._changed.wait_for(
        lambda: self._published_version >= version,
        max(deadline_s - time.monotonic(), 0.0),
      )
      if self._published_version < version:
        raise errors.DeadlineExceededError(
          f'replay server {self._address} did not confirm variables '
          f'{version} within {timeout_s:g} s ({self._error or "no answer"})'
        )

  def close(self, timeout_s: float = 1.0) -> None:
    """Ends the thread; variables not yet published are dropped."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    self._transport.close()
    self._thread.join(max(timeout_s, 0.0))

  def _write_file(self, payload: np.ndarray, version: int) -> np.ndarray:
    if self._directory is None:
      raise ValueError(
        f'variables of {payload.size} bytes must be at most inline_bytes '
        f'({self._inline_bytes}); give the sink a directory for larger ones'
      )
    return variables_lib.encode_pointer(
      variables_lib.write_file(
        payload, self._directory, self._publisher, version
      )
    )

  def _run(self) -> None:
    num_inserts = 0
    while True:
      with self._changed:
        self._changed.wait_for(self._has_work, _CHECK_PERIOD_S)
        if self._closed:
          return
        newest, due = self._newest, self._has_work()
      if newest is None:
        continue
      try:
        seen = self._transport.state().inserts_completed
        # Fewer inserts than we know of: another server, or an older state.
        if due or seen < num_inserts:
          self._insert(*newest)
          num_inserts = seen + 1
      except errors.ReplayUnavailableError as e:
        with self._changed:
          self._error = str(e)
          self._changed.wait_for(lambda: self._closed, _RETRY_S)

  def _has_work(self) -> bool:
    return self._closed or (
      self._newest is not None and self._newest[0] > self._published_version
    )

  def _insert(
    self, version: int, publication: publications.Publication
  ) -> None:
    self._transport.insert(
      publications.pack(publication, self._chunk_bytes), version
    )
    with self._changed:
      self._published_version = max(self._published_version, version)
      self._changed.notify_all()


class VariableSource(core.VariableSource):
  """Holds the newest variables that the learner published.

  A daemon thread asks the server every `period_s` whether there are newer
  ones (about 0.25 ms of CPU) and fetches them if so; `get_variables` only
  looks at what the thread has.
  """

  def __init__(
    self,
    address: str,
    transport: Transport,
    health: health_lib.HealthCheck,
    *,
    period_s: float = 0.05,
    unavailable_timeout_s: float = 120.0,
  ):
    """Starts the source; returns at once, whether the server is up or not.

    Args:
      address: 'host:port' of the server that the learner publishes to.
      transport: to it; closed with the source.
      health: of the server; closed with the source.
      period_s: seconds between questions to it.
      unavailable_timeout_s: seconds without an answer from the server after
        which the source has failed for good.
    """
    self._address = address
    self._transport = transport
    self._health = health
    self._period_s = period_s
    self._unavailable_timeout_s = unavailable_timeout_s
    self._changed = threading.Condition()
    self._newest: types.Variables | None = None
    self._publisher: int | None = None
    self._published_at_s = math.nan
    self._damaged = 0
    self._stop = threading.Event()
    threading.Thread(
      target=self._run, daemon=True, name=f'variables from {address}'
    ).start()

  @property
  def damaged(self) -> int:
    """Times that what was fetched was not what had been published."""
    return self._damaged

  def age_s(self) -> float:
    """Seconds since the newest variables were published; NaN without any.

    By the wall clocks of the learner's host and of this one.
    """
    return time.time() - self._published_at_s

  def get_variables(
    self, min_version: int = 0, timeout_s: float = 0.0
  ) -> types.Variables | None:
    """See `core.VariableSource`; leaves are read-only arrays.

    The same object comes back until there are newer variables.
    """

    def ready() -> bool:
      return (
        self._newest is not None and self._newest.policy_version >= min_version
      )

    deadline_s = time.monotonic() + timeout_s
    with self._changed:
      while not ready():
        self._raise_if_failed()
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0 or self._stop.is_set():
          return None
        self._changed.wait(min(remaining_s, 1.0))
      return self._newest

  def close(self) -> None:
    """Ends the thread; `get_variables` returns what there was."""
    self._stop.set()
    self._health.close()
    self._transport.close()
    with self._changed:
      self._changed.notify_all()

  def _raise_if_failed(self) -> None:
    silent_s = self._health.silent_s()
    if silent_s > self._unavailable_timeout_s:
      raise errors.ReplayUnavailableError(
        f'replay server {self._address}, the source of variables, has not '
        f'answered for {silent_s:.0f} s (unavailable_timeout_s is '
        f'{self._unavailable_timeout_s:g})'
      )

  def _run(self) -> None:
    num_inserts: int | None = None
    retry_s = _RETRY_S
    while not self._stop.is_set():
      try:
        state = self._transport.state()
        self._health.heard()
        if state.inserts_completed != num_inserts and state.current_size:
          self._take(publications.unpack(self._transport.fetch()))
        num_inserts = state.inserts_completed
        retry_s = _RETRY_S
      # A pointer's file may have been replaced since: the next item tells.
      except (errors.ReplayUnavailableError, OSError, ValueError) as e:
        self._damaged += isinstance(e, ValueError)
        if retry_s == _RETRY_S and not self._stop.is_set():
          logging.info('variables from %s: %s', self._address, e)
        num_inserts = None
        self._stop.wait(retry_s)
        retry_s = min(2 * retry_s, _MAX_RETRY_S)
      self._stop.wait(self._period_s)

  def _take(self, publication: publications.Publication) -> None:
    buffer = publication.payload
    pointer = variables_lib.decode_pointer(buffer)
    if pointer is not None:
      buffer = variables_lib.read_file(pointer)
    variables = variables_lib.decode(buffer)
    with self._changed:
      # A server restored from a checkpoint may hold older variables for a
      # moment; a learner that resumed may rightly begin with older ones.
      if (
        self._newest is None
        or publication.publisher != self._publisher
        or variables.policy_version >= self._newest.policy_version
      ):
        self._newest = variables
        self._publisher = publication.publisher
        self._published_at_s = publication.published_at_s
        self._changed.notify_all()
