"""Permits through the table of a real server."""

import threading
import time

import pytest

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import entries
from tunix_reverb.replay import permits as permits_lib
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import insert_stream
from tunix_reverb.staleness import bound as bound_lib

_CONFIG = tables.TableConfig(balance=tables.PERMIT_BALANCE)
_BIG = 5 << 40  # As ids of permits are.


@pytest.fixture
def address(serve):
  return serve(_CONFIG).address


@pytest.fixture
def table(address, closing):
  return closing(permits_lib.WirePermitTable([address]))


def _permits(*ids, version=3):
  return [types.Permit(_BIG + i, version) for i in ids]


def _take(source, count, timeout_s=20.0):
  """Waits until `count` permits have come."""
  deadline_s = time.monotonic() + timeout_s
  come = []
  while len(come) < count:
    assert time.monotonic() < deadline_s, come
    come += source.take(0.2)
  return come


def test_permits_come_as_they_were_put_in_order(address, table, closing):
  source = closing(permits_lib.WirePermitSource(address))
  table.insert(_permits(1, 2, version=3) + _permits(3, version=7))
  source.request(3)
  assert _take(source, 3) == _permits(1, 2) + _permits(3, version=7)
  assert table.state() == (3, 3, 0)


def test_no_more_are_taken_than_were_requested(address, table, closing):
  source = closing(permits_lib.WirePermitSource(address))
  table.insert(_permits(*range(10)))
  assert source.take(0.0) == []
  source.request(2)
  source.request(1)
  assert _take(source, 3) == _permits(0, 1, 2)
  assert source.take(0.7) == [], 'longer than it stands in line'
  assert table.state() == (10, 3, 7)


def test_several_actors_get_each_permit_once_whenever_it_comes(
  address, table, closing
):
  sources = [closing(permits_lib.WirePermitSource(address)) for _ in range(3)]
  for source in sources:
    source.request(4)
  table.insert(_permits(*range(6)))
  deadline_s = time.monotonic() + 20.0
  come = []
  while len(come) < 6:
    assert time.monotonic() < deadline_s
    for source in sources:
      come += source.take(0.05)
  table.insert(_permits(*range(6, 12)))
  while len(come) < 12:
    assert time.monotonic() < deadline_s
    for source in sources:
      come += source.take(0.05)
  assert sorted(come) == _permits(*range(12))


def test_the_first_does_not_wait_for_the_rest(address, table, closing):
  source = closing(permits_lib.WirePermitSource(address))
  source.request(8)
  table.insert(_permits(1))
  begin_s = time.monotonic()
  assert _take(source, 1) == _permits(1)
  assert time.monotonic() - begin_s < 2.0


def test_deleted_permits_are_not_taken(address, table, closing):
  table.insert(_permits(1, 2, 3))
  table.delete([_BIG + 2, _BIG + 3, 77])
  assert table.state() == (3, 0, 1)
  source = closing(permits_lib.WirePermitSource(address))
  source.request(2)
  assert _take(source, 1) == _permits(1)
  table.reset()
  assert table.state() == (0, 0, 0)
  table.insert(_permits(9))
  assert _take(source, 1) == _permits(9)


def test_what_is_taken_while_others_are_deleted_comes_before_them(
  address, table, closing
):
  """The ledger knows by the number taken which ones were."""
  source = closing(permits_lib.WirePermitSource(address))
  base, come, wanted = 0, [], 0
  for _ in range(30):
    ids = list(range(base, base + 40))
    base += 40
    table.insert(_permits(*ids))
    before = len(come)
    source.request(20 - wanted)
    come += source.take(1.0)
    table.delete([_BIG + i for i in ids])
    state = table.state()
    assert state.size == 0
    # Whatever was handed out by now is on its way to us.
    come += _take(source, state.samples - len(come))
    taken = [p.permit_id - _BIG for p in come[before:]]
    assert taken == ids[: len(taken)]
    wanted = 20 - len(taken)
  assert len(come) == table.state().samples


def test_close_of_a_source_in_line_is_prompt(address, closing):
  source = closing(permits_lib.WirePermitSource(address))
  source.request(1)
  threading.Timer(0.3, source.close).start()
  begin_s = time.monotonic()
  assert source.take(20.0) == []
  assert time.monotonic() - begin_s < 3.0


def test_what_is_not_used_is_given_back(address, table, closing):
  source = closing(permits_lib.WirePermitSource(address))
  table.insert(_permits(1, 2, 3))
  source.request(3)
  assert _take(source, 3) == _permits(1, 2, 3)
  source.close([_BIG + 1, _BIG + 3])
  assert sorted(table.removals()) == [
    types.Removal(_BIG + i, 0, bound_lib.FRESH) for i in (1, 3)
  ]
  unseen = closing(permits_lib.WirePermitSource(address))
  unseen.request(1)
  table.insert(_permits(4))
  deadline_s = time.monotonic() + 20.0
  while table.state().samples < 4:
    assert time.monotonic() < deadline_s
  unseen.close()
  # It may have died on the way to us: then its lease ends it.
  assert table.removals() in (
    [],
    [types.Removal(_BIG + 4, 0, bound_lib.FRESH)],
  )


@pytest.mark.slow  # A server is killed and comes back, 15 s.
def test_a_source_outlives_its_server(serve, start_process, closing):
  process = start_process(_CONFIG)
  source = closing(permits_lib.WirePermitSource(process.address))
  source.request(2)
  process.kill()
  table = closing(permits_lib.WirePermitTable([process.address]))
  with pytest.raises(
    (errors.ReplayUnavailableError, errors.DeadlineExceededError)
  ):
    table.insert(_permits(1))
  start_process(_CONFIG, port=process.port)
  deadline_s = time.monotonic() + 30.0
  while True:
    try:
      table.insert(_permits(1, 2))
      break
    except (errors.ReplayUnavailableError, errors.DeadlineExceededError):
      assert time.monotonic() < deadline_s
  assert _take(source, 2, 40.0) == _permits(1, 2)


def test_removals_of_all_servers_are_read_once(serve, closing):
  addresses = [serve(_CONFIG).address for _ in range(2)]
  table = closing(permits_lib.WirePermitTable(addresses))
  assert table.removals() == []
  told = [
    [entries.Removal(1, 11, 5, 1), entries.Removal(2, 12, 6, 2)],
    [entries.Removal(3, 13, 7, 2)],
  ]
  for key, (address, removals) in enumerate(zip(addresses, told)):
    inserter = closing(insert_stream.Inserter(address))
    for half in range(2):
      columns = entries.encode_removals(removals)
      entry = (tables.REMOVED, 10 * key + half, 0.0)
      inserter.insert([insert_stream.NewItem([entry], columns)], 10.0)
  expected = [
    types.Removal(r.permit_id, r.length, r.cause)
    for removals in told
    for r in removals
  ]
  assert sorted(table.removals()) == sorted(2 * expected)
  assert table.removals() == []
