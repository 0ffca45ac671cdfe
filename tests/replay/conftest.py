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


class _HostedServer:
  """A replay server in the process of a `_ServerHost`."""

  def __init__(self, host: _ServerHost, address: str, port: int):
    self._host = host
    self.address = address
    self.port = port
    self._stopped = False

  def stop(self, timeout_s: float) -> None:
    """As `ReplayServer.stop`."""
    del timeout_s
    if not self._stopped:
      self._stopped = True
      self._host.ask(stop=self.port)


class _ServerHost:
  """A process in which servers are started and stopped; see `server_host`."""

  def __init__(self, python: str):
    self._process = subprocess.Popen(
      [python, str(_SERVER_MAIN.with_name('server_host.py'))],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )

  def start(self, config: tables.TableConfig, port: int) -> _HostedServer:
    answer = self.ask(start=dataclasses.asdict(config), port=port)
    return _HostedServer(self, answer['address'], answer['port'])

  def ask(self, **order) -> dict:
    self._process.stdin.write(json.dumps(order) + '\n')
    self._process.stdin.flush()
    return json.loads(self._process.stdout.readline())

  def close(self) -> None:
    for stream in (self._process.stdin, self._process.stdout):
      stream.close()
    self._process.kill()
    self._process.wait(30)


@pytest.fixture(scope='session')
def server_host(request):
  """A process for the servers of `serve`; None if they can be in this one."""
  if importlib.util.find_spec('reverb') is not None:
    yield None
    return
  host = _ServerHost(request.getfixturevalue('server_python'))
  yield host
  host.close()


@pytest.fixture
def serve(request, server_host):
  """Starts servers for tests that care not where, and stops them at the end.

  In this process; in the modern lane, which cannot serve, in one of the other.
  """
  if server_host is None:
    yield request.getfixturevalue('start_server')
    return
  servers = []

  def start(config=None, port=0):
    config = config or tables.TableConfig(max_items=4)
    servers.append(server_host.start(config, port))
    return servers[-1]

  yield start
  for server in servers:
    server.stop(20.0)


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
