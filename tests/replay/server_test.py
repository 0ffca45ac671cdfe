"""The port of a replay server: it is alone there."""

import socket
import time

import pytest

from tunix_reverb import errors
from tunix_reverb.replay import test_utils

pytestmark = [pytest.mark.replay, pytest.mark.timeout(60)]


def test_a_port_in_use_is_refused(start_server):
  server = start_server()
  with pytest.raises(errors.UserError, match=rf'port \({server.port}\).*free'):
    start_server(port=server.port)
  with socket.socket() as other:
    other.bind(('127.0.0.1', 0))
    other.listen()
    port = other.getsockname()[1]
    with pytest.raises(errors.UserError, match=rf'port \({port}\)'):
      start_server(port=port)


def test_a_port_can_be_served_again_at_once(start_server, make_writer):
  server = start_server()
  writer = make_writer(server.address)
  assert writer.write(test_utils.item(), 10.0)
  deadline_s = time.monotonic() + 10.0
  while not writer.confirmed_items:
    assert time.monotonic() < deadline_s
    time.sleep(0.005)
  server.stop(20.0)
  assert start_server(port=server.port).port == server.port
