"""What a server serves beside the trajectories, and the records in there."""

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb.replay import clients
from tunix_reverb.replay import entries
from tunix_reverb.replay import small_tables
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils


@pytest.mark.replay
@pytest.mark.timeout(60)
@pytest.mark.parametrize('mode', ['queue', 'replay'])
def test_permits_bring_their_tables(start_server, mode):
  config = tables.TableConfig(mode=mode, balance='permits', min_items=2)
  server = start_server(config)
  served = clients.describe(server.address, 10.0)
  trajectories = served[tables.TRAJECTORIES]
  assert trajectories == tables.describe(config, test_utils.columns())
  expected = small_tables.make_small_tables('permits')
  assert served.keys() == {
    tables.TRAJECTORIES,
    tables.VARIABLES,
    *(table.name for table in expected),
  }
  for table in expected:
    description = served[table.name]
    assert [*description.signature.values()] == [*table.columns.values()]
    assert description.max_items == table.max_items
    assert description.min_items == 1
    assert (description.mode == 'queue') == (table.max_times_sampled == 1)


@pytest.mark.replay
@pytest.mark.timeout(60)
def test_a_limiter_needs_the_version_only(start_server):
  server = start_server()
  assert clients.describe(server.address, 10.0).keys() == {
    tables.TRAJECTORIES,
    tables.VARIABLES,
    tables.POLICY_VERSION,
  }
  with pytest.raises(errors.SpecMismatchError, match='admission: this run has'):
    clients.check_signature(
      server.address,
      test_utils.columns(),
      tables.TableConfig(balance='permits'),
      10.0,
    )


_ENTRY = entries.Entry(2**64 - 1, 7, 1.25e9 + 0.125, -3, 99)


@pytest.mark.parametrize('number', [1, 3])
def test_entries_survive_their_columns(number):
  told = [_ENTRY._replace(key=2**64 - i) for i in range(1, number + 1)]
  columns = entries.encode_entries(told)
  for column, spec in zip(columns, small_tables.ENTRY_COLUMNS.values()):
    assert spec.accepts(column)
  assert entries.decode_entries(columns) == told


def test_removals_survive_their_columns():
  removals = [entries.Removal(2**64 - i, i, 3 * i, 1) for i in range(1, 4)]
  columns = entries.encode_removals(removals)
  for column, spec in zip(columns, small_tables.REMOVED_COLUMNS.values()):
    assert spec.accepts(column)
  assert entries.decode_removals(columns) == removals


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda columns: columns[:-1], 'an item of 4 columns must hold key'),
    (
      lambda columns: [columns[0].astype(np.int64), *columns[1:]],
      'column key',
    ),
    (lambda columns: [columns[0][0], *columns[1:]], 'column key'),
    (lambda columns: [columns[0][:0], *columns[1:]], 'one length'),
    (
      lambda columns: [*columns[:2], np.array([np.nan]), *columns[3:]],
      'created_at_s',
    ),
  ],
)
def test_what_is_no_entry_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    entries.decode_entries(change(entries.encode_entry(_ENTRY)))


def test_removals_of_different_lengths_are_refused():
  columns = entries.encode_removals([entries.Removal(1, 2, 3, 1)] * 2)
  with pytest.raises(ValueError, match='one length'):
    entries.decode_removals([columns[0][:1], *columns[1:]])
