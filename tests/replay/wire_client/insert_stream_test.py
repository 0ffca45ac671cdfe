"""`Inserter` against real servers."""

import socket
import time

import ml_dtypes
import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.replay import entries
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import codec
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.replay.wire_client import sample_stream

pytestmark = pytest.mark.timeout(60)

_PERMITS = tables.TableConfig(balance=tables.PERMIT_BALANCE)


def _entry(key):
  return entries.encode_entry(entries.Entry(key, 3, 1.5, 7, 12))


def _inserter(server, closing):
  return closing(insert_stream.Inserter(server.address))


def _sizes(server):
  infos = admin.info(server.address, 10.0)
  return {name: info.current_size for name, info in infos.items()}


def test_an_item_in_two_tables_and_another_in_one_request(serve, closing):
  server = serve(_PERMITS)
  inserter = _inserter(server, closing)
  first = insert_stream.NewItem(
    [(tables.INDEX, 1, 3.0), (tables.ANNOUNCEMENTS, 1, 3.0)], _entry(1)
  )
  second = insert_stream.NewItem(
    [(tables.ANNOUNCEMENTS, 2**64 - 1, 4.0)], _entry(2**64 - 1)
  )
  inserter.insert([first, second], 10.0)
  sizes = _sizes(server)
  assert sizes[tables.INDEX] == 1 and sizes[tables.ANNOUNCEMENTS] == 2
  puller = closing(sample_stream.Puller(server.address, tables.ANNOUNCEMENTS))
  items = puller.pull(2, 10.0)
  assert [(i.key, i.priority) for i in items] == [(1, 3.0), (2**64 - 1, 4.0)]
  for item, sent in zip(items, (first, second)):
    for received, column in zip(item.columns, sent.columns):
      np.testing.assert_array_equal(received, column, strict=True)


def test_the_same_key_again_is_not_stored_twice(serve, closing):
  server = serve(_PERMITS)
  for priority in (1.0, 2.0):
    inserter = _inserter(server, closing)
    inserter.insert(
      [insert_stream.NewItem([(tables.INDEX, 5, priority)], _entry(5))], 10.0
    )
  assert _sizes(server)[tables.INDEX] == 1
  puller = closing(sample_stream.Puller(server.address, tables.INDEX))
  assert [i.priority for i in puller.pull(1, 10.0)] == [2.0]


def test_a_full_table_ends_the_call_by_its_deadline(serve, closing):
  server = serve(tables.TableConfig(max_items=1))
  inserter = _inserter(server, closing)
  items = [
    insert_stream.NewItem([(tables.TRAJECTORIES, key, 1.0)], [np.arange(3)])
    for key in range(2)
  ]
  inserter.insert(items[:1], 10.0)
  start_s = time.monotonic()
  with pytest.raises(errors.DeadlineExceededError, match='1 item'):
    inserter.insert(items[1:], 0.3)
  assert 0.3 <= time.monotonic() - start_s < 2.0
  puller = closing(sample_stream.Puller(server.address, tables.TRAJECTORIES))
  assert [i.key for i in puller.pull(2, 10.0)] == [0, 1]
  inserter.insert([items[0]], 10.0)


def test_nobody_there_is_told_and_later_somebody_is(serve, closing):
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    port = probe.getsockname()[1]
  inserter = closing(insert_stream.Inserter(f'localhost:{port}'))
  item = insert_stream.NewItem([(tables.INDEX, 1, 1.0)], _entry(1))
  with pytest.raises(errors.ReplayUnavailableError, match=str(port)):
    inserter.insert([item], 10.0)
  server = serve(_PERMITS, port=port)
  deadline_s = time.monotonic() + 20.0
  while True:
    try:
      inserter.insert([item], 10.0)
      break
    except errors.ReplayUnavailableError:
      assert time.monotonic() < deadline_s
      time.sleep(0.05)
  assert _sizes(server)[tables.INDEX] == 1


def test_what_the_server_refuses_names_the_reason(serve, closing):
  inserter = _inserter(serve(), closing)
  for table, priority, error, match in (
    ('no_such', 1.0, errors.ReplayUnavailableError, 'no_such'),
    (tables.VARIABLES, -1.0, ValueError, 'priority'),
  ):
    with pytest.raises(error, match=match):
      inserter.insert(
        [insert_stream.NewItem([(table, 1, priority)], [np.zeros(2)])], 10.0
      )
  with pytest.raises(ValueError, match='entry'):
    inserter.insert([], 10.0)


_EXOTIC = [
  np.arange(3).astype(ml_dtypes.bfloat16),
  np.arange(3).astype(ml_dtypes.float8_e5m2),
  np.arange(3).astype(ml_dtypes.float8_e4m3fn),
]


@pytest.mark.replay
def test_the_official_client_reads_every_dtype_and_shape(closing):
  import reverb

  server = reverb.Server(
    tables=[
      reverb.Table(
        name='t',
        sampler=reverb.selectors.Fifo(),
        remover=reverb.selectors.Fifo(),
        max_size=10,
        rate_limiter=reverb.rate_limiters.MinSize(1),
      )
    ]
  )
  sent = [
    *(np.ones((2, 3), dtype) for dtype in codec.NUMBERS),
    np.float32(3.5),
    np.zeros((0, 4), np.int16),
    np.zeros(5000, np.float32),
    np.random.default_rng(0).random((100, 30)),
    np.array([b'', b'abc', b'\0'], object),
    *_EXOTIC,
  ]
  try:
    inserter = closing(insert_stream.Inserter(f'localhost:{server.port}'))
    inserter.insert([insert_stream.NewItem([('t', 9, 2.0)], sent)], 10.0)
    sampler = reverb.pybind.Client(f'localhost:{server.port}').NewSampler(
      't', 1, 1
    )
    key, _, size, priority, _, *received = sampler.GetNextTrajectory()
    assert (int(key), int(size), float(priority)) == (9, 1, 2.0)
    assert len(received) == len(sent)
    for ours, theirs in zip(sent, received):
      ours = np.asarray(ours)
      stored = codec.stored_dtype(ours.dtype)
      expected = ours if stored.hasobject else ours.view(stored)
      np.testing.assert_array_equal(theirs[0], expected)
      assert theirs.shape == (1, *ours.shape)
      assert theirs.dtype == expected.dtype
      back = codec.view_as(theirs[0], ours.dtype)
      assert back.tobytes() == ours.tobytes() or stored.hasobject
  finally:
    server.stop()
