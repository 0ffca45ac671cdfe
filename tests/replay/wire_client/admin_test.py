"""Orders to a server over the wire; the questions are in the contract suite."""

import math
import pathlib
import socket
import threading
import time

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import connection
from tunix_reverb.replay.wire_client import insert_stream

pytestmark = pytest.mark.timeout(60)

_REPLAY = tables.TableConfig(
  mode='replay',
  sampler='prioritised',
  max_items=64,
  samples_per_insert_tolerance=1e6,
)


@pytest.fixture
def server(serve):
  return serve(_REPLAY).address


def _insert(address: str, keys) -> None:
  inserter = insert_stream.Inserter(address)
  try:
    inserter.insert(
      [
        insert_stream.NewItem(
          [(tables.TRAJECTORIES, key, 1.0)], [np.zeros(3, np.int32)]
        )
        for key in keys
      ],
      10.0,
    )
  finally:
    inserter.close()


def _state(address: str) -> tables.LimiterState:
  return admin.limiter_state(address, 5.0)[tables.TRAJECTORIES]


def test_items_are_deleted_by_key_and_unknown_keys_ignored(server):
  keys = [0, 1, 7, 2**63, 2**64 - 1]
  _insert(server, keys)
  admin.delete_items(server, tables.TRAJECTORIES, keys[1:4], 5.0)
  assert _state(server).current_size == 2
  # Again, and with keys that were never there.
  admin.delete_items(server, tables.TRAJECTORIES, [*keys[1:4], 12345], 5.0)
  admin.delete_items(
    server, tables.TRAJECTORIES, np.array(keys[:1], np.uint64), 5.0
  )
  assert _state(server).current_size == 1
  admin.delete_items(server, tables.TRAJECTORIES, keys[4:], 5.0)
  assert _state(server).current_size == 0


def test_a_channel_serves_for_many_orders(server):
  with connection.open_channel(server) as channel:
    _insert(server, range(64))
    start_s = time.monotonic()
    for key in range(64):
      admin.delete_items(channel, tables.TRAJECTORIES, [key], 5.0)
    assert time.monotonic() - start_s < 5.0
    assert admin.limiter_state(channel, 5.0)['trajectories'].current_size == 0
    with pytest.raises(errors.SpecMismatchError, match="a table 'nope'"):
      admin.delete_items(channel, 'nope', [1], 5.0)


@pytest.mark.parametrize('priority', [-1.0, math.nan, math.inf])
def test_a_priority_that_would_end_the_table_is_refused(server, priority):
  _insert(server, [5])
  with pytest.raises(ValueError, match='of item 5 must be finite and >= 0'):
    admin.update_priorities(server, tables.TRAJECTORIES, {5: priority}, 5.0)
  admin.update_priorities(server, tables.TRAJECTORIES, {5: 2.0, 6: 1.0}, 5.0)
  assert _state(server).current_size == 1


def test_a_full_table_evicts_by_the_updated_priorities(server):
  """The remover is a min-heap on the priority."""
  _insert(server, range(64))
  admin.update_priorities(
    server, tables.TRAJECTORIES, dict.fromkeys(range(63), 9.0), 5.0
  )
  _insert(server, [100])  # Evicts item 63, the lowest.
  admin.delete_items(server, tables.TRAJECTORIES, range(63), 5.0)
  assert _state(server).current_size == 1
  admin.delete_items(server, tables.TRAJECTORIES, [63], 5.0)
  assert _state(server).current_size == 1


def test_reset_empties_a_table_and_its_counts(server):
  _insert(server, range(5))
  assert _state(server).inserts_completed == 5
  admin.reset(server, tables.TRAJECTORIES, 5.0)
  state = _state(server)
  assert (state.current_size, state.inserts_completed) == (0, 0)
  _insert(server, range(5))  # The keys are free again.
  assert _state(server).current_size == 5


def test_reset_of_an_unknown_table_names_those_there_are(server):
  with pytest.raises(errors.SpecMismatchError) as raised:
    admin.reset(server, 'nope', 5.0)
  assert server in str(raised.value)
  assert 'trajectories, variables' in str(raised.value)


def test_a_checkpoint_is_written_where_it_says(server):
  _insert(server, range(5))
  path = pathlib.Path(admin.checkpoint(server, 20.0))
  assert (path / 'DONE').exists()


def test_a_checkpoint_that_cannot_be_written_is_told(server):
  root = pathlib.Path(admin.checkpoint(server, 20.0)).parent
  for path in root.iterdir():
    path.rename(root.parent / f'{root.name}_{path.name}')
  root.rmdir()
  root.write_text('a file where the directory was')
  try:
    with pytest.raises(errors.CheckpointError, match=f'{server} could not'):
      admin.checkpoint(server, 20.0)
  finally:
    root.unlink()
    root.mkdir()
  assert _state(server).current_size == 0  # It goes on serving.


def test_a_server_that_never_answers_is_told_by_the_deadline():
  """It takes connections and stays silent."""
  with socket.create_server(('127.0.0.1', 0)) as silent:
    address = f'127.0.0.1:{silent.getsockname()[1]}'
    calls = [
      lambda: admin.info(address, 0.3),
      lambda: admin.wait_for_server(address, 0.3),
      lambda: admin.delete_items(address, 'trajectories', [1], 0.3),
      lambda: admin.update_priorities(address, 'trajectories', {1: 1.0}, 0.3),
      lambda: admin.reset(address, 'trajectories', 0.3),
      lambda: admin.checkpoint(address, 0.3),
    ]
    for call in calls:
      start_s = time.monotonic()
      with pytest.raises(
        (errors.ReplayUnavailableError, errors.DeadlineExceededError)
      ) as raised:
        call()
      assert time.monotonic() - start_s < 2.0
      assert address in str(raised.value)
      assert '0.3 s' in str(raised.value)


def test_waiting_ends_when_the_server_comes(serve):
  probe = socket.create_server(('127.0.0.1', 0))
  port = probe.getsockname()[1]
  probe.close()
  answers = []
  waiter = threading.Thread(
    target=lambda: answers.append(
      admin.wait_for_server(f'localhost:{port}', 30.0)
    )
  )
  waiter.start()
  serve(_REPLAY, port=port)
  waiter.join(30.0)
  assert answers == [True]


def test_bad_keys_are_refused_before_they_are_sent(server):
  with pytest.raises((ValueError, TypeError)):
    admin.delete_items(server, tables.TRAJECTORIES, [-1], 5.0)
  with pytest.raises((ValueError, TypeError)):
    admin.delete_items(server, tables.TRAJECTORIES, [2**64], 5.0)


def test_columns_of_the_contract_fit_what_is_served(server):
  admin.check_signature(server, test_utils.columns(), _REPLAY, 5.0)
