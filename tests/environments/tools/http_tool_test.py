"""HTTP for the policy, against a real server on the loopback."""

import contextlib
import http.server
import sys
import threading

import pytest

from tunix_reverb import errors
from tunix_reverb.environments.tools import calls
from tunix_reverb.environments.tools import http_tool
from tunix_reverb.environments.tools import runner

pytest.importorskip('httpx', reason='httpx is missing')


class _Handler(http.server.BaseHTTPRequestHandler):
  """Answers by path."""

  def log_message(self, *args):
    pass

  def _answer(self, status, body=b'', **headers):
    self.send_response(status)
    self.send_header('Content-Length', str(len(body)))
    for name, value in headers.items():
      self.send_header(name.replace('_', '-'), value)
    self.end_headers()
    self.wfile.write(body)

  def do_GET(self):
    self.server.paths.append(self.path)
    if self.path.startswith('/to/'):
      self._answer(302, Location=self.path.removeprefix('/to/'))
    elif self.path == '/loop':
      self._answer(302, Location='/loop')
    elif self.path == '/large':
      with contextlib.suppress(OSError):  # The client goes away.
        self._answer(200, b'x' * (8 << 20), Content_Type='text/plain')
    elif self.path == '/image':
      self._answer(200, b'\x00' * 7, Content_Type='image/png')
    elif self.path == '/slow':
      self.server.release.wait(30)
    elif self.path == '/busy':
      self._answer(503 if self.server.paths.count('/busy') < 3 else 200, b'ok')
    elif self.path == '/missing':
      self._answer(404, b'nothing')
    else:
      self._answer(200, f'{self.headers["Host"]}{self.path}'.encode())

  def do_POST(self):
    body = self.rfile.read(int(self.headers['Content-Length']))
    kind = self.headers.get('Content-Type', 'none')
    self._answer(200, kind.encode() + b' ' + body)


@pytest.fixture
def server():
  """Yields the server; `paths` are what it was asked for."""
  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), _Handler) as made:
    made.paths, made.release = [], threading.Event()
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.release.set()
    made.shutdown()
    thread.join(20)


def _base(server):
  return f'http://127.0.0.1:{server.server_port}'


def _run(tool, **arguments):
  return runner.run(calls.Call('http', arguments), [tool])


def test_a_request(server):
  base = _base(server)
  tool = http_tool.make([base])
  record = _run(tool, url=f'{base}/a?b=1')
  assert record.error is None
  assert record.result == f'HTTP 200\n127.0.0.1:{server.server_port}/a?b=1'
  assert base in tool.description
  record = _run(tool, url=base, method='post', body='{"a": 1}')
  assert record.result == 'HTTP 200\napplication/json {"a": 1}'
  assert _run(tool, url=f'{base}/missing').result == 'HTTP 404\nnothing'


@pytest.mark.parametrize(
  'url',
  [
    '{base}/v10/x',
    '{base}/v1/../secret',
    '{base}/v1/%2e%2e/secret',
    '{base}/other',
    'http://localhost:{port}/v1/x',
    'https://127.0.0.1:{port}/v1/x',
    'http://127.0.0.1/v1/x',
    'http://127.0.0.1:{port}@192.0.2.1/v1/x',
    'http://user:password@127.0.0.1:{port}/v1/x',
    'ftp://127.0.0.1:{port}/v1/x',
    'file:///etc/passwd',
    'http://[::1]:{port}/v1/x',
    '//127.0.0.1:{port}/v1/x',
    'http://127.0.0.1:99999/v1/x',
    'nonsense',
    '',
  ],
)
def test_what_is_not_on_the_list_is_not_reached(server, url):
  base = _base(server)
  tool = http_tool.make([f'{base}/v1/'])
  record = _run(tool, url=url.format(base=base, port=server.server_port))
  assert record.error == 'tool'
  assert server.paths == []
  assert _run(tool, url=f'{base}/v1/x').error is None
  assert server.paths == ['/v1/x']


def test_redirects_are_checked_like_requests(server):
  base = _base(server)
  tool = http_tool.make([base])
  assert _run(tool, url=f'{base}/to//x').result.endswith('/x')
  record = _run(tool, url=f'{base}/to/http://192.0.2.1/')
  assert record.error == 'tool'
  assert 'http://192.0.2.1/ is not among what can be reached' in record.result
  record = _run(tool, url=f'{base}/loop')
  assert record.result == 'error: more than 3 redirects'


def test_a_name_at_a_private_address_is_refused(server):
  port = server.server_port
  url = f'http://rebound.example:{port}/'
  resolved = []

  def resolve(host, port):
    resolved.append((host, port))
    return ['127.0.0.1']

  tool = http_tool.make([url], resolve=resolve)
  record = _run(tool, url=url)
  assert record.result == 'error: rebound.example is at no public address'
  assert resolved == [('rebound.example', port)]
  assert server.paths == []


@pytest.mark.parametrize(
  'address',
  [
    '10.0.0.1',
    '169.254.169.254',
    '192.168.1.1',
    '::1',
    'fe80::1%eth0',
    '0.0.0.0',
  ],
)
def test_no_private_address_passes(address):
  tool = http_tool.make(
    ['http://inside.example'], resolve=lambda host, port: [address]
  )
  record = _run(tool, url='http://inside.example/')
  assert record.result == 'error: inside.example is at no public address'


def test_localhost_may_be_named(server):
  base = f'http://localhost:{server.server_port}'
  tool = http_tool.make([base], resolve=lambda host, port: ['127.0.0.1'])
  result = _run(tool, url=f'{base}/x').result
  assert result == f'HTTP 200\nlocalhost:{server.server_port}/x'


def test_responses_are_bounded(server):
  base = _base(server)
  tool = http_tool.make([base], max_bytes=10_000, max_result_characters=20_000)
  result = _run(tool, url=f'{base}/large').result
  assert result == 'HTTP 200\n' + 'x' * 10_000
  assert _run(tool, url=f'{base}/image').result == (
    'HTTP 200\n[7 bytes of image/png]'
  )


def test_a_server_that_does_not_answer_is_a_timeout(server):
  base = _base(server)
  record = _run(http_tool.make([base], timeout_s=0.2), url=f'{base}/slow')
  assert record.error == 'timeout'


def test_a_busy_server_is_asked_again(server):
  base = _base(server)
  tool = http_tool.make([base], num_retries=3, back_off_s=0.01)
  record = _run(tool, url=f'{base}/busy')
  assert (record.result, record.num_attempts) == ('HTTP 200\nok', 3)


def test_a_server_that_is_away_is_told():
  tool = http_tool.make(['http://127.0.0.1:9'])
  record = _run(tool, url='http://127.0.0.1:9/')
  assert record.error == 'tool'
  assert 'ConnectError' in record.result


def test_methods_are_on_a_list(server):
  base = _base(server)
  record = _run(http_tool.make([base]), url=base, method='DELETE')
  assert record.result == 'error: method DELETE is not allowed; use GET, POST'


@pytest.mark.parametrize(
  'places,words',
  [
    ([], 'must name what may be reached'),
    (['example.org'], 'must be http:// or https:// and a host'),
    (['http://a:b@example.org'], 'must hold no user and password'),
  ],
)
def test_bad_places_are_refused(places, words):
  with pytest.raises(errors.UserError) as raised:
    http_tool.make(places)
  assert words in str(raised.value)
  with pytest.raises(errors.UserError, match='timeout_s'):
    http_tool.make(['http://127.0.0.1'], timeout_s=None)


def test_a_missing_library_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'httpx', None)
  with pytest.raises(errors.MissingExtraError, match=r'\[agents\]'):
    http_tool.make(['http://127.0.0.1'])
