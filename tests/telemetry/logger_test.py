"""Metrics are valid JSON lines and TensorBoard events on any disk."""

import json
import math
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from tunix_reverb.telemetry import logger as logger_lib
from tunix_reverb.telemetry import reader as reader_lib


def _refuse(name):
  raise AssertionError(f'{name} is not JSON')


def _rows(path):
  return [
    json.loads(line, parse_constant=_refuse)
    for line in path.read_text().splitlines()
    if line
  ]


@pytest.fixture
def logger(tmp_path):
  logger = logger_lib.MetricLogger(tmp_path, 'learner')
  yield logger
  logger.close()


def test_a_line_is_complete_on_disk_after_each_write(logger, tmp_path):
  path = tmp_path / 'metrics' / 'learner.jsonl'
  for step in (1, 2):
    logger.write({'loss': np.float32(0.5), 'learner_step': step}, step)
    rows = _rows(path)
    assert len(rows) == step
    assert rows[-1].pop('time_s') > 1e9
    assert rows[-1] == {
      'role': 'learner',
      'step': step,
      'loss': 0.5,
      'learner_step': step,
    }


def test_nan_and_infinity_stay_valid_json_and_come_back(logger, tmp_path):
  values = {'loss': math.nan, 'entropy': math.inf, 'pg_loss': -math.inf}
  logger.write(values, 1)
  row = _rows(tmp_path / 'metrics' / 'learner.jsonl')[0]
  assert (row['loss'], row['entropy'], row['pg_loss']) == ('nan', 'inf', '-inf')
  read = reader_lib.Reader(tmp_path).poll()[0].values
  assert math.isnan(read['loss'])
  assert (read['entropy'], read['pg_loss']) == (math.inf, -math.inf)


def test_an_unknown_name_is_refused(logger, tmp_path):
  with pytest.raises(ValueError, match='fps'):
    logger.write({'fps': 1.0}, 1)
  assert not (tmp_path / 'metrics').exists()


def test_without_a_run_directory_nothing_is_written(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  logger = logger_lib.MetricLogger(None, 'learner')
  logger.write({'loss': 1.0}, 1)
  with pytest.raises(ValueError, match='fps'):
    logger.write({'fps': 1.0}, 1)
  logger.close()
  assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_what_was_written(logger, tmp_path):
  from tensorboardX.proto import event_pb2

  logger.write({'loss': 0.25, 'entropy': math.nan}, 7)
  logger.write({'loss': 0.125}, 8)
  (path,) = (tmp_path / 'tensorboard' / 'learner').iterdir()
  data, found = path.read_bytes(), []
  while data:  # A record: length, its checksum, data, its checksum.
    (size,) = struct.unpack('<Q', data[:8])
    event = event_pb2.Event.FromString(data[12 : 12 + size])
    found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    data = data[16 + size :]
  assert (7, 'loss', 0.25) in found and (8, 'loss', 0.125) in found
  assert len(found) == 3


_WRITER = """
import pathlib, resource, signal, sys
from tunix_reverb.telemetry import logger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
m = logger.MetricLogger(pathlib.Path(sys.argv[1]), 'learner')
m.write({'loss': 1.0}, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for step in range(1, 100):
  m.write({'loss': 1.0}, step)
resource.setrlimit(
    resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
m.write({'loss': 2.0}, 100)
m.close()
print('training went on')
"""


def test_a_full_disk_costs_one_warning_and_recovers(tmp_path, subprocess_env):
  # A limit on the size of files fails writes half way, as a full disk does.
  result = subprocess.run(
    [sys.executable, '-c', _WRITER, str(tmp_path)],
    env=subprocess_env,
    text=True,
    capture_output=True,
    timeout=60,
  )
  assert result.stdout == 'training went on\n', result.stderr
  assert result.stderr.count('warning: learner: metrics cannot be written') == 1
  assert result.stderr.count('\n') == 1
  reader = reader_lib.Reader(tmp_path)
  rows = reader.poll()
  assert reader.bad_lines == 1
  assert rows[0].step == 0
  assert (rows[-1].step, rows[-1].values['loss']) == (100, 2.0)


def test_a_line_cut_off_by_a_crash_does_not_spoil_the_next(tmp_path):
  path = tmp_path / 'metrics' / 'learner.jsonl'
  path.parent.mkdir()
  path.write_text('{"time_s": 1.0, "role": "lea')
  logger = logger_lib.MetricLogger(tmp_path, 'learner')
  logger.write({'loss': 3.0}, 5)
  logger.close()
  assert json.loads(path.read_text().splitlines()[1])['loss'] == 3.0


def test_close_leaves_no_file_open(tmp_path):
  logger = logger_lib.MetricLogger(tmp_path, 'learner')
  logger.write({'loss': 1.0}, 1)
  logger.close()
  logger.close()
  links = [
    os.readlink(f'/proc/self/fd/{fd}')
    for fd in os.listdir('/proc/self/fd')
    if os.path.exists(f'/proc/self/fd/{fd}')
  ]
  assert not [link for link in links if str(tmp_path) in link]
