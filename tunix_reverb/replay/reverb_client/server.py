"""The replay server: Reverb's tables, checkpoints that survive damage, no hang.

What a restored checkpoint brings with it (limits, selectors, signature, the
limiter's counters) overrides what the code asks for, so a checkpoint of a
different table is refused before it is loaded.
"""

from __future__ import annotations

import errno
import logging
import pathlib
import socket
import tempfile
import threading

import reverb
from reverb.platform.default import checkpointers
import tensorflow as tf

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import checkpoints
from tunix_reverb.replay import small_tables
from tunix_reverb.replay import tables
from tunix_reverb.replay.reverb_client import admin
from tunix_reverb.replay.reverb_client import connection
from tunix_reverb.replay.reverb_client import variables

_FIX_MISMATCH = (
  'Start with the old values, pass --replay_restore=discard, or move the '
  'directory away'
)


class ReplayServer:
  """Serves the tables of one shard.

  Args:
    config: the trajectory table.
    columns: `Trajectories` of `ColumnSpec`, the table's signature.
    port: to serve on, on every interface; 0 picks a free one.
    checkpoint_dir: of this server alone; None keeps no checkpoints.
    checkpoints_to_keep: newest checkpoints retained.
    restore: load the newest usable checkpoint if there is one; False puts
      those there are aside.
    start_timeout_s: seconds that loading and the first answer may take.

  Raises:
    errors.UserError: the port is taken.
    errors.SpecMismatchError: the checkpoint was written by a run whose table
      differs; every difference is listed.
    errors.CheckpointError: checkpoints are there and none can be loaded, or
      the directory cannot be used.
    errors.DeadlineExceededError: not serving within `start_timeout_s`.

  Attributes:
    port: it serves on.
    address: 'localhost:port', for clients on this machine.
    restored_from: the retained checkpoint that was loaded, or None.
    balance: what keeps the trajectory table's balance; see `TableConfig`.
  """

  def __init__(
    self,
    *,
    config: tables.TableConfig,
    columns: types.Trajectories,
    port: int,
    checkpoint_dir: pathlib.Path | None,
    checkpoints_to_keep: int = 2,
    restore: bool = True,
    start_timeout_s: float = 600.0,
  ):
    """Starts serving; when this returns, the server has answered."""
    self.restored_from: pathlib.Path | None = None
    self._start_timeout_s = start_timeout_s
    self._description = tables.describe(config, columns)
    self.balance = self._description.balance
    self._checkpointing = threading.Lock()
    self._store: checkpoints.CheckpointStore | None = None
    _check_columns(self._description.signature)
    self.port, self._claim = _claim_port(port)
    self.address = f'localhost:{self.port}'
    self._scratch: tempfile.TemporaryDirectory | None = None
    try:
      if checkpoint_dir is not None:
        self._store = checkpoints.CheckpointStore(
          checkpoint_dir, keep=checkpoints_to_keep
        )
      self._server = self._start(restore)
    except BaseException:
      self._release()
      raise

  def checkpoint(self, timeout_s: float) -> pathlib.Path:
    """Writes a checkpoint and retains it. Returns where.

    Inserts and samples go on meanwhile. At the deadline the writing goes on
    in the background; another call is refused until it has ended.

    Raises:
      errors.CheckpointError: it could not be written, for instance on a full
        disk; the ones retained before are untouched and the server goes on.
      errors.DeadlineExceededError: not done within `timeout_s`.
    """
    store = self._store
    if store is None:
      raise errors.CheckpointError(
        'checkpoint_dir (None) must name a directory to write a checkpoint'
      )
    if not self._checkpointing.acquire(blocking=False):
      raise errors.DeadlineExceededError(
        'the previous replay checkpoint is still being written'
      )
    return connection.run_with_deadline(
      lambda: self._write_checkpoint(store),
      timeout_s,
      f'replay checkpoint into {store.directory}',
    )

  def limiter_metrics(self, timeout_s: float) -> dict[str, float]:
    """The trajectory table's state, by the names of the metrics.

    Raises:
      errors.ReplayUnavailableError: no answer within `timeout_s`.
    """
    state = admin.limiter_state(self.address, timeout_s)[tables.TRAJECTORIES]
    return {
      'table_items': state.current_size,
      'inserts_total': state.inserts_completed,
      'samples_total': state.samples_completed,
      'inserts_blocked': int(not state.can_insert),
      'samples_blocked': int(not state.can_sample),
      'inserts_blocked_s_total': state.inserts_blocked_s,
      'samples_blocked_s_total': state.samples_blocked_s,
    }

  def stop(self, timeout_s: float) -> None:
    """Ends serving; writes no checkpoint. Idempotent.

    Raises:
      errors.DeadlineExceededError: not down within `timeout_s`.
    """
    try:
      connection.run_with_deadline(
        self._server.stop, timeout_s, f'stop of replay server {self.address}'
      )
    except errors.DeadlineExceededError:
      # Its destructor would wait for the same, without a deadline.
      connection.keep_alive(self._server)
      raise
    finally:
      self._release()

  def _start(self, restore: bool) -> reverb.Server:
    server = self._load_or_create(restore)
    try:
      self._check_serving()
    except BaseException:
      # Waiting for it could take long; the caller's error is what matters.
      threading.Thread(target=server.stop, daemon=True).start()
      raise
    return server

  def _load_or_create(self, restore: bool) -> reverb.Server:
    """Loads the newest usable checkpoint, or starts empty."""
    store = self._store
    if store is None:
      self._scratch = tempfile.TemporaryDirectory(prefix='replay_server_')
      return self._serve(pathlib.Path(self._scratch.name))
    if not restore:
      discarded = store.discard_all()
      if discarded:
        logging.info('replay checkpoints were put aside in %s', discarded)
    problems = []
    for path in store.paths():
      try:
        server = self._serve_checkpoint(store, path)
      except checkpoints.DamagedCheckpointError as e:
        problems.append(str(e))
        continue
      if problems:
        logging.warning(
          'fell back to replay checkpoint %s; not loadable: %s',
          path,
          '; '.join(problems),
        )
      self.restored_from = path
      logging.info('replay checkpoint restored: %s', path)
      return server
    if problems:
      raise errors.CheckpointError(
        f'no replay checkpoint in {store.directory} can be loaded: '
        f'{"; ".join(problems)}. Pass --replay_restore=discard or move the '
        'directory away to start empty'
      )
    store.clear_working()
    return self._serve(store.working)

  def _serve_checkpoint(
    self, store: checkpoints.CheckpointStore, path: pathlib.Path
  ) -> reverb.Server:
    checkpoint = store.load(path)
    lines = tables.differences(
      self._description, checkpoint.description, 'the checkpoint'
    )
    if lines:
      raise errors.SpecMismatchError(
        f'this run and replay checkpoint {path} must agree: '
        f'{"; ".join(lines)}. {_FIX_MISMATCH}'
      )
    store.stage(checkpoint)
    try:
      return self._serve(store.working)
    except connection.STATUS_ERRORS as e:
      raise checkpoints.DamagedCheckpointError(f'{path}: {e}') from e

  def _serve(self, checkpoint_root: pathlib.Path) -> reverb.Server:
    return connection.run_with_deadline(
      lambda: reverb.Server(
        tables=[
          _trajectory_table(self._description),
          variables.make_table(),
          *map(
            _small_table,
            small_tables.make_small_tables(self._description.balance),
          ),
        ],
        port=self.port,
        checkpointer=checkpointers.DefaultCheckpointer(str(checkpoint_root)),
      ),
      self._start_timeout_s,
      f'start of replay server {self.address}',
    )

  def _check_serving(self) -> None:
    """Makes sure that clients find what was asked for, restored or not."""
    admin.wait_for_server(self.address, self._start_timeout_s)
    served = admin.describe(self.address, self._start_timeout_s)
    lines = tables.differences(
      self._description, served[tables.TRAJECTORIES], 'the server'
    )
    if lines:
      raise errors.SpecMismatchError(
        f'the tables served must be those of this run: {"; ".join(lines)}. '
        f'{_FIX_MISMATCH}'
      )

  def _write_checkpoint(
    self, store: checkpoints.CheckpointStore
  ) -> pathlib.Path:
    try:
      client = connection.connect(self.address)
      path = pathlib.Path(client.Checkpoint())
      return store.retain(path, self._description)
    except (*connection.STATUS_ERRORS, OSError) as e:
      store.remove_incomplete()
      raise errors.CheckpointError(
        f'replay checkpoint into {store.directory} could not be written: {e}. '
        'Those retained before are untouched; is the disk full?'
      ) from e
    finally:
      self._checkpointing.release()

  def _release(self) -> None:
    self._claim.close()
    if self._store is not None:
      self._store.close()
    if self._scratch is not None:
      self._scratch.cleanup()


def _trajectory_table(description: tables.TableDescription) -> reverb.Table:
  """The trajectory table, new and empty.

  The remover is a min-heap on the priority, the oldest policy version: what
  a full table evicts is what is most off-policy.
  """
  samplers = {
    'fifo': reverb.selectors.Fifo,
    'uniform': reverb.selectors.Uniform,
    'prioritised': lambda: reverb.selectors.Prioritized(
      description.priority_exponent
    ),
  }
  queue = description.mode == 'queue'
  if description.balance == tables.PERMIT_BALANCE:
    limiter = reverb.rate_limiters.MinSize(description.min_items)
  elif queue:
    limiter = reverb.rate_limiters.Queue(description.max_items)
  else:
    limiter = reverb.rate_limiters.SampleToInsertRatio(
      description.samples_per_insert,
      description.min_items,
      (description.min_diff, description.max_diff),
    )
  return reverb.Table(
    name=description.name,
    sampler=samplers[description.sampler](),
    remover=reverb.selectors.MinHeap(),
    max_size=description.max_items,
    max_times_sampled=1 if queue else 0,
    rate_limiter=limiter,
    signature={
      path: tf.TensorSpec(spec.shape, spec.dtype, name=path)
      for path, spec in description.signature.items()
    },
  )


def _small_table(table: small_tables.SmallTable) -> reverb.Table:
  """One of the tables beside the trajectories, new and empty."""
  samplers = {
    'fifo': reverb.selectors.Fifo,
    'min_heap': reverb.selectors.MinHeap,
  }
  return reverb.Table(
    name=table.name,
    sampler=samplers[table.sampler](),
    remover=reverb.selectors.Fifo(),
    max_size=table.max_items,
    max_times_sampled=table.max_times_sampled,
    rate_limiter=reverb.rate_limiters.MinSize(1),
    # A list, for a dict would be read back in the order of its names.
    signature=[
      tf.TensorSpec(spec.shape, spec.dtype, name=name)
      for name, spec in table.columns.items()
    ],
  )


def _check_columns(signature: dict[str, specs.ColumnSpec]) -> None:
  for path, spec in signature.items():
    if spec.dtype.kind not in 'biufc' or spec.dtype.hasobject:
      raise errors.SpecMismatchError(
        f'column {path} ({spec}) must be a bool, integer or float of NumPy; '
        'store bfloat16 as raw uint16'
      )


def _claim_port(port: int) -> tuple[int, socket.socket]:
  """Makes sure that nobody serves `port`; Reverb itself would share it.

  gRPC binds with SO_REUSEPORT: a second server would start on the same port
  and get every other client. A plain listener cannot be bound beside either.

  Args:
    port: 0 picks a free one.

  Returns:
    The port, and a socket to keep open while serving. It holds an abstract
    Unix name, which settles the race of two servers that start at the same
    moment.

  Raises:
    errors.UserError: the port is taken.
  """
  claim = socket.socket(socket.AF_UNIX)
  try:
    for family, host in (
      (socket.AF_INET6, '::'),
      (socket.AF_INET, '127.0.0.1'),
    ):
      try:
        with socket.socket(family) as probe:
          # Allows connections of an earlier server to linger, not a listener.
          probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
          probe.bind((host, port))
          probe.listen()
          port = probe.getsockname()[1]
      except OSError as e:
        if e.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
          raise  # Else this machine has no IPv6.
    claim.bind(f'\0tunix_reverb replay server port {port}')
  except OSError as e:
    claim.close()
    raise errors.UserError(
      f'port ({port}) must be free: {e.strerror}. Choose another one, or end '
      'what serves it (a replay server of an earlier run?)'
    ) from e
  return port, claim
