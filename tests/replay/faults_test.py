"""Servers that die, and processes that are told to end while they wait."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tunix_reverb import types
from tunix_reverb.replay import client_names
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def _wait_until_confirmed(writer):
  deadline_s = time.monotonic() + 40.0
  while writer.unconfirmed_items:
    assert time.monotonic() < deadline_s, writer.unconfirmed_items
    time.sleep(0.02)


def test_everything_goes_on_after_a_killed_server_is_restarted(
  start_process, closing, client, make_writer, make_sampler, tmp_path
):
  server = start_process(tables.TableConfig(max_items=8), directory=tmp_path)
  writer, sampler = make_writer(server.address), make_sampler(server.address)
  sink = closing(clients.make_variable_sink(server.address, client=client))
  source = closing(clients.make_variable_source(server.address, client=client))
  sink.publish(types.Variables(1, {'w': np.ones(3)}), 10.0)
  assert source.get_variables(1, 10.0) is not None

  def exchange(ids):
    for i in ids:
      assert writer.write(test_utils.item(i), 40.0), writer.unconfirmed_items
    received = []
    while not received or received[-1] != ids[-1]:
      sampled = sampler.sample(40.0)
      assert sampled is not None, received
      received.append(int(sampled.trajectories.episode_id[0]))
    return received

  assert exchange(range(4)) == list(range(4))
  retained = server.checkpoint()
  server.kill()
  # Taken over while nobody serves, delivered once somebody does.
  assert writer.write(test_utils.item(10), 1.0)
  restarted = start_process(
    tables.TableConfig(max_items=8), port=server.port, directory=tmp_path
  )
  assert restarted.restored_from == str(retained)
  assert exchange([11, 12, 13]) == [10, 11, 12, 13]
  _wait_until_confirmed(writer)
  sink.publish(types.Variables(2, {'w': np.ones(3)}), 40.0)
  assert source.get_variables(2, 40.0).policy_version == 2


def test_a_writer_blocked_on_a_killed_server_sends_again(
  start_process, client, make_writer, make_sampler
):
  server = start_process(tables.TableConfig(max_items=2))
  writer = make_writer(server.address)
  sent = 0
  while writer.write(test_utils.item(sent), 0.3):
    sent += 1
  confirmed = writer.confirmed_items
  assert confirmed < sent
  server.kill()
  start_process(tables.TableConfig(max_items=8), port=server.port)
  _wait_until_confirmed(writer)
  # What the dead server had confirmed is lost with it; nothing else is. The
  # wire client does not believe its last confirmations: a window of them.
  first = confirmed - (2 if client == client_names.WIRE else 0)
  assert writer.resent_items == sent - first
  sampler = make_sampler(server.address)
  ids = [
    int(sampler.sample(10.0).trajectories.episode_id[0])
    for _ in range(first, sent)
  ]
  assert sorted(ids) == list(range(first, sent))


_BLOCKED_ROLE = """
import signal, sys, threading
from tunix_reverb.replay import clients, test_utils

stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
client, full, empty = sys.argv[1:]
kwargs = {'columns': test_utils.columns(), 'client': client}
writer = clients.make_writer(full, **kwargs)
sampler = clients.make_sampler([empty], **kwargs)
while writer.write(test_utils.item(), 0.2) or sampler.sample(0.2):
  pass
print('blocked', flush=True)
while not stop.is_set():
  writer.write(test_utils.item(), 0.2)
  sampler.sample(0.2)
writer.close(0.5)
sampler.close()
print('closed', flush=True)
"""


@pytest.mark.parametrize('servers_go', [False, True])
def test_a_blocked_role_ends_at_sigterm(serve, client, servers_go):
  """By itself, with status 0, though calls are blocked in it."""
  servers = [serve(tables.TableConfig(max_items=2)) for _ in range(2)]
  process = subprocess.Popen(
    [
      sys.executable,
      '-c',
      _BLOCKED_ROLE,
      client,
      *(s.address for s in servers),
    ],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  try:
    assert process.stdout.readline() == 'blocked\n'
    if servers_go:
      for server in servers:
        server.stop(20.0)
    time.sleep(0.5)  # Into the blocked calls.
    start_s = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert process.stdout.readline() == 'closed\n'
    closed_after_s = time.monotonic() - start_s
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    assert closed_after_s < 4.0
  finally:
    process.kill()
    process.communicate()
