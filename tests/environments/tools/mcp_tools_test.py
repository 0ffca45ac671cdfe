"""Tools of a real MCP server, over stdio and over HTTP."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tunix_reverb import errors
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import mcp_tools
from tunix_reverb.environments.tools import runner
from tunix_reverb.environments.tools import tool

pytest.importorskip('mcp', reason='mcp is missing')

_START_TIMEOUT_S = 60.0
_LIMITS = tool.Limits(timeout_s=20.0)

_SERVER = """
import os, sys, time
from mcp import types
from mcp.server import MCPServer

server = MCPServer('test')

@server.tool()
def add(a: int, b: int) -> int:
  '''Adds two numbers.'''
  return a + b

@server.tool()
def fail() -> str:
  '''Fails.'''
  raise ValueError('on purpose')

@server.tool()
def sleep(seconds: float) -> str:
  '''Sleeps.'''
  time.sleep(seconds)
  return 'awake'

@server.tool()
def die() -> str:
  '''Ends the server.'''
  os._exit(3)

@server.tool()
def pid() -> int:
  '''Says who it is.'''
  return os.getpid()

@server.tool()
def picture() -> list:
  '''Draws.'''
  data = 'aGVsbG8='
  return [
      types.ImageContent(type='image', data=data, mime_type='image/png'),
      types.TextContent(type='text', text='a picture'),
  ]

if len(sys.argv) > 1:
  server.run('streamable-http', port=int(sys.argv[1]))
else:
  server.run('stdio')
"""


@pytest.fixture(scope='module')
def script(tmp_path_factory):
  path = tmp_path_factory.mktemp('mcp') / 'server.py'
  path.write_text(_SERVER)
  return str(path)


@pytest.fixture
def over_stdio(script):
  made = mcp_tools.McpServer(
    [sys.executable, script], start_timeout_s=_START_TIMEOUT_S, limits=_LIMITS
  )
  with contextlib.closing(made):
    yield made


def _free_port():
  with socket.create_server(('127.0.0.1', 0)) as listener:
    return listener.getsockname()[1]


@pytest.fixture
def over_http(script):
  port = _free_port()
  process = subprocess.Popen(
    [sys.executable, script, str(port)], stderr=subprocess.DEVNULL
  )
  try:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
      try:
        socket.create_connection(('127.0.0.1', port), timeout=1).close()
        break
      except OSError:
        assert process.poll() is None, 'the server ended'
        assert time.monotonic() < deadline, 'the server did not start'
        time.sleep(0.05)
    made = mcp_tools.McpServer(
      f'http://127.0.0.1:{port}/mcp',
      start_timeout_s=_START_TIMEOUT_S,
      limits=_LIMITS,
    )
    with contextlib.closing(made):
      yield made
  finally:
    process.kill()
    process.wait(20)


def _run(tools, name, **arguments):
  return runner.run(calls.Call(name, arguments), tools)


def _check(server):
  tools = server.tools()
  assert server.tools() is tools
  schemas = {t.name: t.schema['function'] for t in tools}
  assert set(schemas) == {'add', 'fail', 'sleep', 'die', 'pid', 'picture'}
  assert schemas['add']['description'] == 'Adds two numbers.'
  assert set(schemas['add']['parameters']['properties']) == {'a', 'b'}
  assert _run(tools, 'add', a=2, b=3).result == '5'
  assert _run(tools, 'picture').result == '[image]\na picture'
  record = _run(tools, 'fail')
  assert record.error == 'tool'
  assert 'fail' in record.result
  assert _run(tools, 'add', a='two', b=3).error == 'parser'


def test_tools_over_http(over_http):
  _check(over_http)


def test_tools_over_stdio_and_the_end_of_the_server(over_stdio):
  _check(over_stdio)
  tools = over_stdio.tools()
  pid = int(_run(tools, 'pid').result)
  assert psutil.pid_exists(pid) and pid != os.getpid()
  over_stdio.close()
  over_stdio.close()
  deadline = time.monotonic() + 20.0
  while psutil.pid_exists(pid) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not psutil.pid_exists(pid)
  assert _run(tools, 'pid').result == 'error: the MCP server has ended'


def test_a_server_that_died_is_started_again(over_stdio):
  tools = over_stdio.tools()
  pid = _run(tools, 'pid').result
  assert _run(tools, 'die').error == 'tool'
  assert _run(tools, 'pid').error == 'tool'
  assert _run(over_stdio.tools(), 'pid').result not in (pid, '')


def test_a_call_has_a_deadline_and_its_answer_is_not_taken_for_another(script):
  server = mcp_tools.McpServer(
    [sys.executable, script],
    start_timeout_s=_START_TIMEOUT_S,
    limits=tool.Limits(timeout_s=0.5),
  )
  with contextlib.closing(server):
    tools = server.tools()
    assert _run(tools, 'sleep', seconds=1.0).error == 'timeout'
    records = [_run(tools, 'add', a=1, b=i) for i in range(40)]
    answers = [record.result for record in records if record.error is None]
    assert answers
    assert 'awake' not in answers
    assert server.tools() is tools  # It is the same server.


@pytest.mark.parametrize(
  'target,words',
  [
    (['no-such-program'], 'No such file'),
    ([sys.executable, '-c', 'pass'], 'closed'),
    ('http://127.0.0.1:9/mcp', 'connection'),
  ],
)
def test_a_server_that_does_not_start_is_told(target, words):
  server = mcp_tools.McpServer(target, start_timeout_s=_START_TIMEOUT_S)
  with pytest.raises(ConnectionError) as raised:
    server.tools()
  assert words in str(raised.value)
  server.close()


def test_a_server_that_says_nothing_is_given_up():
  command = [sys.executable, '-c', 'import time; time.sleep(600)']
  server = mcp_tools.McpServer(command, start_timeout_s=0.5)
  with pytest.raises(ConnectionError, match=r'no answer within 0\.5 s'):
    server.tools()
  deadline = time.monotonic() + 20.0
  alive = lambda: [
    p
    for p in psutil.Process().children(recursive=True)
    if 'time.sleep(600)' in ' '.join(p.cmdline())
  ]
  while alive() and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not alive()


def test_mistakes_are_told():
  with pytest.raises(errors.UserError, match='must be a URL or a command'):
    mcp_tools.McpServer([])
  with pytest.raises(errors.UserError, match='timeout_s'):
    mcp_tools.McpServer(['x'], limits=tool.Limits(timeout_s=None))


def test_a_missing_library_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'mcp', None)
  with pytest.raises(errors.MissingExtraError, match=r'\[agents\]'):
    mcp_tools.McpServer(['x'])
