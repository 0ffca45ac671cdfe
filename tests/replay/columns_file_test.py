"""Columns through a file: the same table comes out."""

import threading
import time

import pytest

from tunix_reverb import errors
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.replay import columns_file
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils


def _nested() -> types.Trajectories:
  spec = lambda *shape, dtype='float32': specs.ColumnSpec(shape, dtype)
  return test_utils.columns()._replace(
    observation={
      'image': spec(None, 4, 4, 3, dtype='uint8'),
      'state': (spec(None, 3), [spec(None, dtype='int64')]),
      'a/b': spec(None),
    },
    core_state=(spec(None, 8), spec(None, 8)),
  )


@pytest.mark.parametrize('columns', [test_utils.columns(), _nested()])
def test_the_same_table_comes_out(tmp_path, columns):
  path = tmp_path / 'columns.json'
  columns_file.write(path, columns)
  read = columns_file.read(path)
  assert specs.differences(read, columns) == []
  config = tables.TableConfig()
  assert tables.describe(config, read) == tables.describe(config, columns)
  assert list(tmp_path.iterdir()) == [path]


def test_a_field_without_columns_stays_empty(tmp_path):
  columns = test_utils.columns()._replace(core_state=())
  columns_file.write(tmp_path / 'columns.json', columns)
  assert columns_file.read(tmp_path / 'columns.json').core_state == ()


@pytest.mark.parametrize(
  'text',
  [
    '{',
    '[]',
    '{"reward": 3}',
    '{"reward": [[1], "no"]}',
    '{"x": [[], "f4"]}',
  ],
)
def test_another_file_is_refused_by_name(tmp_path, text):
  path = tmp_path / 'columns.json'
  path.write_text(text)
  with pytest.raises(errors.UserError, match=r'columns_file .*columns\.json'):
    columns_file.read(path)


def test_a_server_waits_for_the_learner(tmp_path):
  path = tmp_path / 'columns.json'
  writer = threading.Timer(
    0.3, columns_file.write, [path, test_utils.columns()]
  )
  writer.start()
  columns = columns_file.wait(path, 20.0, threading.Event())
  writer.join()
  assert specs.differences(columns, test_utils.columns()) == []


def test_the_wait_ends_by_its_deadline_or_by_stop(tmp_path):
  path = tmp_path / 'columns.json'
  with pytest.raises(errors.UserError, match=r'within 0\.2 s'):
    columns_file.wait(path, 0.2, threading.Event())
  stop = threading.Event()
  timer = threading.Timer(0.2, stop.set)
  timer.start()
  start_s = time.monotonic()
  assert columns_file.wait(path, 60.0, stop) is None
  timer.join()
  assert time.monotonic() - start_s < 30.0
