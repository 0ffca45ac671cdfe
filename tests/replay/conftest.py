"""Real replay servers for tests: in this process, or in one of their own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tunix_reverb.replay import client_names
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # For `sweeper_rig`.

_SERVER_MAIN = pathlib.Path(__file__).parent / 'server_main.py'


class ServerProcess:
  """A replay server in a process of its own, driven over its stdin."""

  def __init__(
    self, python: str, config: tables.TableConfig, port: int, directory
  ):
    self._process = subprocess.Popen(
      [
        python,
        str(_SERVER_MAIN),
        json.dumps(dataclasses.asdict(config)),
        str(port),
        str(directory or ''),
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    self.pid = self._process.pid
    answer = json.loads(self._process.stdout.readline())
    self.address = answer['address']
    self.port = answer['port']
    self.restored_from = answer['restored_from']

  def checkpoint(self) -> pathlib.Path:
    self._process.stdin.write('checkpoint\n')
    self._process.stdin.flush()
    return pathlib.Path(self._process.stdout.readline().strip())

  def kill(self) -> None:
    os.kill(self.pid, signal.SIGKILL)
    self.wait()

  def stop(self, timeout_s: float) -> None:
    """As `ReplayServer.stop`, for tests that do not care where it runs."""
    del timeout_s
    self.kill()

  def wait(self) -> int:
    for stream in (self._process.stdin, self._process.stdout):
      stream.close()
    return self._process.wait(30)

  @property
  def running(self) -> bool:
    return self._process.poll() is None


@pytest.fixture
def start_process(server_python):
  """Starts servers in processes of their own; ends them after the test."""
  processes = []

  def start(config=None, port=0, directory=None) -> ServerProcess:
    config = config or tables.TableConfig(max_items=4)
    processes.append(ServerProcess(server_python, config, port, directory))
    return processes[-1]

  yield start
  for process in processes:
    if process.running:
      process.kill()


@pytest.fixture
def start_server():
  """Starts servers in this process; stops them after the test."""
  servers = []

  def start(config=None, **kwargs):
    options = {
      'columns': test_utils.columns(),
      'port': 0,
      'checkpoint_dir': None,
      **kwargs,
    }
    servers.append(
      clients.make_server(
        config=config or tables.TableConfig(max_items=4), **options
      )
    )
    return servers[-1]

  yield start
  for server in servers:
    server.stop(20.0)


@pytest.fixture
def serve(request):
  """Starts servers for tests that need no more of them than an address.

  In this process; in the modern lane, which cannot serve, in the other one.
  """
  here = importlib.util.find_spec('reverb') is not None
  return request.getfixturevalue('start_server' if here else 'start_process')


@pytest.fixture(
  params=[
    client_names.WIRE,
    pytest.param(client_names.OFFICIAL, marks=pytest.mark.replay),
  ]
)
def client(request) -> str:
  """Each client in turn."""
  return request.param


@pytest.fixture
def closing():
  """Registers things whose `close` is called after the test."""
  things = []

  def register(thing, *arguments):
    things.append((thing, arguments))
    return thing

  yield register
  for thing, arguments in things:
    thing.close(*arguments)


@pytest.fixture
def make_writer(client, closing):
  """Makes writers of `client` to an address; closes them after the test."""

  def make(address, columns=None, **kwargs):
    columns = columns or test_utils.columns()
    return closing(
      clients.make_writer(address, columns=columns, client=client, **kwargs),
      0.0,
    )

  return make


@pytest.fixture
def make_sampler(client, closing):
  """Makes samplers of `client`, as `make_writer` makes writers."""

  def make(*addresses, columns=None, **kwargs):
    columns = columns or test_utils.columns()
    return closing(
      clients.make_sampler(addresses, columns=columns, client=client, **kwargs)
    )

  return make
