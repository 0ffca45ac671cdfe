"""The factory: it loads Reverb when asked, and connects every role alike."""

import contextlib
import subprocess
import sys
import threading

import pytest

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

_COLUMNS = test_utils.columns()


class _Watchdog:
  def __init__(self):
    self.waits = []

  @contextlib.contextmanager
  def waiting(self, what):
    self.waits.append(what)
    yield


def _connect(addresses, config, client, stop=None, timeout_s=10.0):
  watchdog = _Watchdog()
  clients.connect(
    addresses,
    columns=_COLUMNS,
    table_config=config,
    watchdog=watchdog,
    stop=stop or threading.Event(),
    timeout_s=timeout_s,
    client=client,
  )
  return watchdog.waits


def test_importing_the_factory_loads_no_reverb():
  code = (
    'import sys; from tunix_reverb.replay import clients, test_utils; '
    'sys.exit(bool({"reverb", "tensorflow"} & set(sys.modules)))'
  )
  result = subprocess.run([sys.executable, '-c', code], timeout=60)
  assert result.returncode == 0


@pytest.mark.slow  # Waits for servers that do not answer, 20 s.
@pytest.mark.timeout(60)
def test_connect_checks_every_server_and_names_each_wait(serve, client):
  servers = [serve(tables.TableConfig(max_items=n)) for n in (4, 8)]
  addresses = [server.address for server in servers]
  waits = _connect(addresses[:1], tables.TableConfig(max_items=4), client)
  assert waits == [f'this role waits for replay server {addresses[0]}']
  with pytest.raises(errors.SpecMismatchError) as raised:
    _connect(addresses, tables.TableConfig(max_items=4), client)
  assert addresses[1] in str(raised.value)
  assert 'max_table_items: this run has 4, the server has 8' in str(
    raised.value
  )


@pytest.mark.timeout(60)
def test_connect_ends_when_told_to_stop(client):
  stop = threading.Event()
  timer = threading.Timer(0.3, stop.set)
  timer.start()
  _connect(['localhost:1'], tables.TableConfig(), client, stop, timeout_s=50.0)
  timer.join()


def test_an_unknown_client_is_refused_with_those_there_are():
  with pytest.raises(ValueError, match=r"\('wired'\).*one of wire, official"):
    clients.make_writer('localhost:1', columns=_COLUMNS, client='wired')


def test_the_version_served_is_that_of_the_newest_publish(
  serve, client, closing
):
  server, stop = serve(), threading.Event()
  assert clients.served_version(server.address, stop, client=client) == 0
  sink = closing(clients.make_variable_sink(server.address, client=client))
  sink.publish(types.Variables(7, {}), 10.0)
  assert clients.served_version(server.address, stop, client=client) == 7
