"""What each client refuses, skips or gives up on, and how it says so."""

import socket
import threading
import time

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb.replay import clients
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils
from tunix_reverb.replay.wire_client import insert_stream

pytestmark = pytest.mark.timeout(60)

_COLUMNS = test_utils.columns()


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def _write_all(writer, items):
  for item in items:
    assert writer.write(item, 10.0)


def test_check_signature_lists_every_difference(serve, client):
  server = serve(tables.TableConfig(max_items=4))
  clients.check_signature(
    server.address,
    _COLUMNS,
    tables.TableConfig(max_items=4),
    5.0,
    client=client,
  )
  ours = _COLUMNS._replace(
    action=specs.ColumnSpec((None, 2), np.float32), core_state=()
  )
  with pytest.raises(errors.SpecMismatchError) as raised:
    clients.check_signature(
      server.address,
      ours,
      tables.TableConfig(max_items=8),
      5.0,
      client=client,
    )
  message = str(raised.value)
  assert 'max_table_items: this run has 8, the server has 4' in message
  assert 'column action: this run has float32[?, 2]' in message
  assert 'the server has uint8[?]' in message
  assert 'column core_state/0: this run has no such column' in message
  assert 'reward' not in message


def test_nobody_at_the_address_is_told_by_the_deadline(client):
  address = f'localhost:{_free_port()}'
  start_s = time.monotonic()
  with pytest.raises(errors.ReplayUnavailableError, match=address):
    clients.wait_for_server(address, 0.5, client=client)
  with pytest.raises(errors.ReplayUnavailableError, match=address):
    clients.describe(address, 0.5, client=client)
  stop = threading.Event()
  stop.set()
  assert not clients.wait_for_server(address, 60.0, stop, client=client)
  assert time.monotonic() - start_s < 5.0


def test_clients_fail_for_good_when_nobody_answers(make_writer, make_sampler):
  address = f'localhost:{_free_port()}'
  writer = make_writer(address, unavailable_timeout_s=0.5)
  sampler = make_sampler(address, unavailable_timeout_s=0.5)
  for call in (
    lambda: [writer.write(test_utils.item(), 5.0) for _ in range(5)],
    lambda: sampler.sample(5.0),
  ):
    with pytest.raises(errors.ReplayUnavailableError, match=address):
      call()
  assert writer.unconfirmed_items == 2


def test_a_writer_of_other_columns_is_refused(serve, make_writer):
  server = serve()
  theirs = test_utils.columns(observation_size=5)
  writer = make_writer(server.address, theirs)
  assert writer.write(test_utils.item(observation_size=5), 5.0)
  with pytest.raises(errors.SpecMismatchError, match='observation/position'):
    while True:
      writer.write(test_utils.item(observation_size=5), 5.0)


def test_bad_items_are_refused_before_they_are_sent(serve, make_writer):
  writer = make_writer(serve().address)
  with pytest.raises(ValueError, match=r'policy_version \(-1\) must be >= 0'):
    writer.write(test_utils.item(policy_version=-1), 1.0)
  bad = test_utils.item(lengths=(3,))._replace(lengths=np.array([4], np.int32))
  with pytest.raises(ValueError, match='lengths'):
    writer.write(bad, 1.0)
  with pytest.raises(errors.SpecMismatchError, match='column core_state/0'):
    writer.write(test_utils.item()._replace(core_state=()), 1.0)


def test_poison_items_are_counted_and_skipped(
  serve, make_writer, make_sampler, closing
):
  """Items that pass the table's signature and contradict themselves."""
  server = serve(tables.TableConfig(max_items=16))
  sampler = make_sampler(server.address)
  poison = [
    test_utils.item()._replace(lengths=np.array(lengths, np.int32))
    for lengths in ([4], [], [0, 3], [-1, 4], [2, 2])
  ]
  inserter = closing(insert_stream.Inserter(server.address))
  codec = columns_lib.ColumnCodec(_COLUMNS)
  for key, item in enumerate(poison):
    inserter.insert(
      [
        insert_stream.NewItem(
          [(tables.TRAJECTORIES, key, 1.0)], codec.flatten(item)
        )
      ],
      10.0,
    )
  _write_all(make_writer(server.address), [test_utils.item(42)])
  assert sampler.sample(10.0).trajectories.episode_id[0] == 42
  assert sampler.poison_items == len(poison)
  assert sampler.broken_streams == 0


@pytest.mark.parametrize(
  'columns',
  [
    test_utils.columns(observation_size=5),
    _COLUMNS._replace(core_state=()),
    _COLUMNS._replace(reward=specs.ColumnSpec((None,), np.float64)),
  ],
  ids=['shape', 'count', 'dtype'],
)
def test_items_of_other_columns_are_poison(
  serve, columns, make_writer, make_sampler
):
  server = serve()
  _write_all(
    make_writer(server.address), [test_utils.item(i) for i in range(3)]
  )
  sampler = make_sampler(server.address, columns=columns)
  deadline_s = time.monotonic() + 10.0
  while sampler.poison_items < 3 and time.monotonic() < deadline_s:
    assert sampler.sample(0.02) is None
  assert sampler.poison_items == 3
