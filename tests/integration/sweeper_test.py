"""A replay server with admission sweeps its table by itself, and goes on."""

import signal
import time

import binaries
import numpy as np
import pytest

from tunix_reverb import specs
from tunix_reverb.agents import builder
from tunix_reverb.agents import config as config_lib
from tunix_reverb.replay import columns as columns_lib
from tunix_reverb.replay import entries
from tunix_reverb.replay import tables
from tunix_reverb.replay.wire_client import admin
from tunix_reverb.replay.wire_client import insert_stream

pytestmark = [pytest.mark.integration, pytest.mark.timeout(360)]

_ROLE = 'replay_server_0'


def _trajectory(key, version):
  """Its item and its entry, as a writer sends them."""
  columns = builder.make_agent(config_lib.ExperimentConfig()).columns
  codec = columns_lib.ColumnCodec(columns)
  arrays = {
    path: np.full([n or 1 for n in spec.shape], version, spec.dtype)
    for path, spec in specs.flatten_columns(columns).items()
  }
  entry = entries.Entry(key, version, time.time(), key, 1)
  arrays['created_at_s'][:] = entry.created_at_s
  return [
    insert_stream.NewItem(
      [(table, key, version) for table in (tables.INDEX, tables.ANNOUNCEMENTS)],
      entries.encode_entry(entry),
    ),
    insert_stream.NewItem(
      [(tables.TRAJECTORIES, key, version)],
      [arrays[path] for path in codec.paths],
    ),
  ]


def _insert(address, items):
  inserter = insert_stream.Inserter(address)
  inserter.insert(items, 20.0)
  inserter.close()


def _version(version):
  return insert_stream.NewItem(
    [(tables.POLICY_VERSION, version, version)], [np.array(version)]
  )


def test_a_server_with_admission_sweeps(start, port, tmp_path):
  run_dir, address = tmp_path / 'run', f'localhost:{port}'
  flags = (
    '--run_dir=run',
    f'--port={port}',
    '--admission',
    '--replay_client=wire',
    '--trajectories_per_update=4',
    '--max_policy_lag=2',
    '--sweep_period_s=0.2',
  )
  size = lambda table: admin.info(address, 20.0)[table].current_size

  server = start('replay_server', *flags)
  binaries.wait_until(
    lambda: f'serves on port {port}' in server.out, server, 120.0
  )
  _insert(address, [_version(3), *_trajectory(1, 1), *_trajectory(2, 2)])
  # As a checkpoint takes it that comes between an item and its entry.
  _insert(address, _trajectory(3, 3)[1:])
  _insert(address, [_version(4)])
  binaries.wait_until(lambda: size(tables.TRAJECTORIES) == 2, server)
  binaries.wait_until(
    lambda: binaries.last(run_dir, _ROLE, 'swept_lag_total') == 1, server
  )
  assert binaries.last(run_dir, _ROLE, 'sweep_entries') == 2
  assert size(tables.REMOVED) == 1
  assert server.stop(signal.SIGTERM) == 0, server.err

  server = start('replay_server', *flags)
  binaries.wait_until(lambda: 'restored' in server.out, server, 120.0)
  binaries.wait_until(
    lambda: binaries.last(run_dir, _ROLE, 'sweep_entries') == 3, server
  )
  assert size(tables.TRAJECTORIES) == 2
  _insert(address, [_version(9)])
  binaries.wait_until(lambda: size(tables.TRAJECTORIES) == 0, server)
  binaries.wait_until(
    lambda: binaries.last(run_dir, _ROLE, 'swept_lag_total') == 2, server
  )
  assert server.stop(signal.SIGTERM) == 0, server.err
