"""Variables through a one-item table of the replay server.

An item holds the encoded variables cut into equal chunks (the last one
padded), one timestep of the writer's each; what is too large for the table's
memory goes to a file, and the item holds a pointer to it.
"""

from __future__ import annotations

import logging
import pathlib
import secrets
import threading
import time

import numpy as np
import reverb
from reverb import pybind
import tensorflow as tf

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb import variables as variables_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay.reverb_client import connection

_CONNECT_TIMEOUT_S = 1
_CHUNK_BYTES = 16 << 20
_INLINE_BYTES = 200 << 20

# How often an idle sink looks whether a restarted server lost the variables.
_CHECK_PERIOD_S = 2.0
_RETRY_S = 0.2


def make_table() -> reverb.Table:
  """The table that holds the newest variables, new and empty."""
  return reverb.Table(
    name=tables.VARIABLES,
    sampler=reverb.selectors.Lifo(),
    remover=reverb.selectors.Fifo(),
    max_size=1,
    rate_limiter=reverb.rate_limiters.MinSize(1),
    # In the order of sorted names, as tree.flatten has them.
    signature={
      'data': tf.TensorSpec([None], tf.uint8, 'data'),
      'num_bytes': tf.TensorSpec([], tf.int64, 'num_bytes'),
      'publisher': tf.TensorSpec([], tf.uint64, 'publisher'),
    },
  )


class ReverbVariableSink(core.VariableSink):
  """Publishes variables into the table of one server.

  A daemon thread talks to the server. It publishes the newest variables again
  when the server has lost them, as after a restart without a checkpoint.
  """

  def __init__(
    self,
    address: str,
    *,
    directory: pathlib.Path | None = None,
    inline_bytes: int = _INLINE_BYTES,
    chunk_bytes: int = _CHUNK_BYTES,
  ):
    """Starts the sink; returns at once, whether the server is up or not.

    Args:
      address: 'host:port' of the server.
      directory: for variables above `inline_bytes`, on storage that every
        role sees; None refuses them.
      inline_bytes: most bytes sent through the table.
      chunk_bytes: bytes per chunk.
    """
    self._address = address
    self._directory = directory
    self._inline_bytes = inline_bytes
    self._chunk_bytes = chunk_bytes
    # Tells a restarted learner, whose versions may go back, from a server
    # that came back with an old item.
    self._publisher = secrets.randbits(63)
    self._changed = threading.Condition()
    self._newest: tuple[int, np.ndarray] | None = None
    self._version = -1
    self._published_version = -1
    self._error: str | None = None
    self._closed = False
    self._thread = threading.Thread(
      target=self._run, daemon=True, name=f'variables to {address}'
    )
    self._thread.start()

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
      self._newest = (version, payload)
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
    client = connection.connect(self._address)
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
        info = connection.table_infos(client, _CONNECT_TIMEOUT_S)[
          tables.VARIABLES
        ]
        seen = info.rate_limiter_info.insert_stats.completed
        # Fewer inserts than we know of: another server, or an older state.
        if due or seen < num_inserts:
          self._insert(client, *newest)
          num_inserts = seen + 1
      except (*connection.STATUS_ERRORS, KeyError) as e:
        self._error = f'{type(e).__name__}: {e}'
        client = connection.connect(self._address)
        time.sleep(_RETRY_S)

  def _has_work(self) -> bool:
    return self._closed or (
      self._newest is not None and self._newest[0] > self._published_version
    )

  def _insert(
    self, client: pybind.Client, version: int, payload: np.ndarray
  ) -> None:
    """Inserts one item over a stream of its own, so that none is left open."""
    chunk_bytes = min(self._chunk_bytes, payload.size)
    num_chunks = -(-payload.size // chunk_bytes)
    writer = client.NewWriter(
      chunk_length=1,
      max_timesteps=num_chunks,
      delta_encoded=False,
      max_in_flight_items=1,
    )
    connection.keep_alive(writer)
    for i in range(num_chunks):
      chunk = payload[i * chunk_bytes : (i + 1) * chunk_bytes]
      if chunk.size < chunk_bytes:
        chunk = np.pad(chunk, (0, chunk_bytes - chunk.size))
      writer.Append(
        [
          chunk,
          np.array(payload.size, np.int64),
          np.array(self._publisher, np.uint64),
        ]
      )
    writer.CreateItem(tables.VARIABLES, num_chunks, float(version))
    writer.Flush()
    writer.Close(False)
    connection.let_go(writer)
    with self._changed:
      self._published_version = max(self._published_version, version)
      self._changed.notify_all()


class ReverbVariableSource(core.VariableSource):
  """Holds the newest variables that the learner published.

  A daemon thread asks the server every `period_s` whether there are newer
  ones (about 0.25 ms of CPU) and fetches them if so; `get_variables` only
  looks at what the thread has.
  """

  def __init__(
    self,
    address: str,
    *,
    period_s: float = 0.05,
    unavailable_timeout_s: float = 120.0,
  ):
    """Starts the source; returns at once, whether the server is up or not.

    Args:
      address: 'host:port' of the server that the learner publishes to.
      period_s: seconds between questions to it.
      unavailable_timeout_s: seconds without an answer from the server after
        which the source has failed for good.
    """
    self._address = address
    self._period_s = period_s
    self._unavailable_timeout_s = unavailable_timeout_s
    self._changed = threading.Condition()
    self._newest: types.Variables | None = None
    self._publisher: int | None = None
    self._stop = threading.Event()
    self._health = connection.HealthCheck(address)
    threading.Thread(
      target=self._run, daemon=True, name=f'variables from {address}'
    ).start()

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
    client = connection.connect(self._address)
    num_inserts = -1
    while not self._stop.is_set():
      try:
        info = connection.table_infos(client, _CONNECT_TIMEOUT_S)[
          tables.VARIABLES
        ]
        self._health.heard()
        seen = info.rate_limiter_info.insert_stats.completed
        if seen != num_inserts and info.current_size:
          self._fetch(client)
          num_inserts = seen
      except (*connection.STATUS_ERRORS, KeyError, OSError) as e:
        # A pointer's file may have been replaced since: the next item tells.
        logging.info('variables from %s: %s', self._address, e)
        client = connection.connect(self._address)
        num_inserts = -1
        self._stop.wait(_RETRY_S)
      self._stop.wait(self._period_s)

  def _fetch(self, client: pybind.Client) -> None:
    sampler = client.NewSampler(tables.VARIABLES, 1, 1)
    columns = sampler.GetNextTrajectory()[pybind.Sampler.NUM_INFO_TENSORS :]
    data, num_bytes, publisher = columns
    buffer = data.reshape(-1)[: int(num_bytes[0])]
    pointer = variables_lib.decode_pointer(buffer)
    if pointer is not None:
      buffer = variables_lib.read_file(pointer)
    variables = variables_lib.decode(buffer)
    with self._changed:
      # A server restored from a checkpoint may hold older variables for a
      # moment; a learner that resumed may rightly begin with older ones.
      if (
        self._newest is None
        or int(publisher[0]) != self._publisher
        or variables.policy_version >= self._newest.policy_version
      ):
        self._newest = variables
        self._publisher = int(publisher[0])
        self._changed.notify_all()
