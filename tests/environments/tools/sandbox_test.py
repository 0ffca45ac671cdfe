"""Sandboxes: what works in them, and every attempt to get out.

Each attempt prints ESCAPED where it succeeds.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import socket
import threading
import time
import uuid

import psutil
import pytest

from tunix_reverb import errors
from tunix_reverb.environments.tools import bubblewrap
from tunix_reverb.environments.tools import monty
from tunix_reverb.environments.tools import sandbox
from tunix_reverb.environments.tools import taxonomy

_LIMITS = sandbox.Limits(
  wall_s=4.0,
  cpu_s=1,
  memory_bytes=96 << 20,
  max_processes=4,
  disk_bytes=1 << 20,
  output_bytes=10_000,
)


def _bubblewrap(wall_s=60.0):
  """One whose start may take as long as it does on a busy machine."""
  try:
    return bubblewrap.Bubblewrap(dataclasses.replace(_LIMITS, wall_s=wall_s))
  except errors.UserError as e:
    pytest.skip(f'bubblewrap: {e}')


def _monty():
  pytest.importorskip('pydantic_monty', reason='pydantic-monty is missing')
  return monty.Monty(_LIMITS)


@pytest.fixture(params=[_bubblewrap, _monty], ids=['bubblewrap', 'monty'])
def box(request):
  with contextlib.closing(request.param()) as made:
    yield made


@pytest.fixture
def bwrap():
  return _bubblewrap()


@pytest.fixture
def impatient_bwrap():
  return _bubblewrap(wall_s=_LIMITS.wall_s)


def test_a_program_runs(box):
  result = box.run('x = [i * i for i in range(4)]\nprint(sum(x), "é")')
  assert result == sandbox.Result('14 é\n', True)


def test_runs_share_nothing(box):
  assert box.run('x = 1').succeeded
  result = box.run('print(x)')
  assert not result.succeeded
  assert 'NameError' in result.output


@pytest.mark.parametrize('program', ['1 / 0', 'def f(:', 'assert 1 == 2'])
def test_what_a_program_raises_is_reported(box, program):
  result = box.run('print("so far")\n' + program)
  assert (result.succeeded, result.stopped) == (False, None)
  assert 'Error' in result.output


def test_an_endless_loop_is_stopped(box):
  result = box.run('while True:\n  pass')
  assert (result.succeeded, result.stopped) == (False, 'time')


@pytest.mark.parametrize(
  'program',
  [
    'x = "a" * 10**10',
    'x = []\nwhile True:\n  x.append("y" * 100_000)',
  ],
)
def test_a_memory_bomb_is_stopped(box, program):
  result = box.run(program)
  assert (result.succeeded, result.stopped) == (False, 'memory')


def test_an_output_flood_is_stopped(box):
  result = box.run('while True:\n  print("x" * 100)')
  assert (result.succeeded, result.stopped) == (False, 'output')
  assert len(result.output) < 2 * _LIMITS.output_bytes


@contextlib.contextmanager
def _server():
  """A listener on the host's loopback; yields its port and who connected."""
  connected = []
  with socket.create_server(('127.0.0.1', 0)) as listener:
    listener.settimeout(0.1)
    done = threading.Event()

    def accept():
      while not done.is_set():
        with contextlib.suppress(TimeoutError):
          connection, address = listener.accept()
          connection.close()
          connected.append(address)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
      yield listener.getsockname()[1], connected
    finally:
      done.set()
      thread.join()


_CONNECT = """
import socket
socket.create_connection(('127.0.0.1', {port}), timeout=1)
print('ESC' + 'APED')
"""


def test_the_network_is_out_of_reach(box):
  with _server() as (port, connected):
    result = box.run(_CONNECT.format(port=port))
    with socket.create_connection(('127.0.0.1', port), timeout=5):
      pass  # The listener does listen.
  assert not result.succeeded
  assert 'Error' in result.output
  assert 'ESCAPED' not in result.output
  assert len(connected) == 1


def test_other_addresses_are_unreachable(bwrap):
  result = bwrap.run(
    'import socket\n'
    's = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n'
    's.connect(("192.0.2.1", 53))\n'
    'print("ESC" + "APED")'
  )
  assert 'unreachable' in result.output
  assert 'ESCAPED' not in result.output


@pytest.mark.parametrize(
  'path', ['{secret}', '/etc/passwd', '/proc/1/environ', '/dev/mem']
)
def test_files_of_the_host_cannot_be_read(box, path, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text('ESCAPED' * 10)
  secret.chmod(0o644)
  path = path.format(secret=secret)
  result = box.run(f'print("ESC" + "APED" if open({path!r}).read() else "")')
  assert 'ESCAPED' not in result.output


def test_files_of_the_host_cannot_be_written(box, tmp_path):
  tmp_path.chmod(0o777)
  name = f'sandbox_{uuid.uuid4().hex}'
  targets = [str(tmp_path / name), f'/{name}', f'/usr/{name}', f'/dev/{name}']
  for path in targets:
    result = box.run(f'open({path!r}, "w").write("x")\nprint("ESC" + "APED")')
    assert not result.succeeded, path
    assert 'ESCAPED' not in result.output
    assert not pathlib.Path(path).exists()
  # /tmp is the program's own, where there is one.
  box.run(f'open("/tmp/{name}", "w").write("x")')
  assert not pathlib.Path(f'/tmp/{name}').exists()


def test_a_full_disk_is_full(bwrap):
  result = bwrap.run(
    'for i in range(100):\n'
    '  open(f"/tmp/{i}", "wb").write(b"x" * 100_000)\n'
    'print("ESC" + "APED")'
  )
  assert not result.succeeded
  assert 'No space left' in result.output


_FORK_BOMB = """
import os, time
open('/proc/self/comm', 'w').write({name!r})
forked = 0
while True:
  try:
    if os.fork() == 0:
      time.sleep(30)
    forked += 1
  except OSError as e:
    print('forked', forked, e, flush=True)
    time.sleep(30)
"""


def _alive(name):
  return [
    process.pid
    for process in psutil.process_iter(['name', 'status'])
    if process.info['name'] == name
    and process.info['status'] != psutil.STATUS_ZOMBIE
  ]


def test_a_fork_bomb_is_stopped(impatient_bwrap):
  name = uuid.uuid4().hex[:12]
  result = impatient_bwrap.run(_FORK_BOMB.format(name=name))
  assert (result.succeeded, result.stopped) == (False, 'time')
  # Four at once, with the first.
  assert result.output.startswith('forked 3 [Errno 11] Resource temporarily')
  # The kernel ends them all, a moment after it ends the first.
  deadline = time.monotonic() + 20.0
  while _alive(name) and time.monotonic() < deadline:
    time.sleep(0.02)
  assert not _alive(name)


def test_a_fork_bomb_that_spins_is_stopped(impatient_bwrap):
  result = impatient_bwrap.run(
    'import os\nwhile True:\n  try: os.fork()\n  except OSError: pass'
  )
  assert (result.succeeded, result.stopped) == (False, 'time')


def test_threads_count_as_processes(bwrap):
  result = bwrap.run(
    'import threading, time\n'
    'for i in range(99):\n'
    '  threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n'
    'print("ESC" + "APED")'
  )
  assert "can't start new thread" in result.output
  assert 'ESCAPED' not in result.output


def test_sleeping_is_stopped(impatient_bwrap):
  result = impatient_bwrap.run(
    'import time\nprint("a", flush=True)\ntime.sleep(60)'
  )
  assert result == sandbox.Result('a\n', False, 'time')


def test_a_child_cannot_outlive_the_program(bwrap):
  result = bwrap.run(
    'import os, time\nif os.fork() == 0:\n  time.sleep(60)\nprint("parent")'
  )
  assert result == sandbox.Result('parent\n', True)


def test_processes_of_the_host_are_out_of_sight(bwrap):
  result = bwrap.run(
    'import os\n'
    'print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()))\n'
    f'os.kill({os.getpid()}, 0)'
  )
  assert result.output.startswith('[1, 2]\n')
  assert 'ProcessLookupError' in result.output


_PRIVILEGES = """
import ctypes, os, resource
print(os.getuid(), [l for l in open('/proc/self/status') if 'Cap' in l])
libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x00020000, 0x40000000):
  print('unshare', libc.unshare(flag))
print('mount', libc.mount(b'none', b'/tmp', b'tmpfs', 0, b''))
for name in ('NPROC', 'AS', 'FSIZE'):
  try:
    resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (2**40, 2**40))
    print('ESC' + 'APED')
  except ValueError:
    print('refused')
try:
  os.setuid(0)
  print('ESC' + 'APED')
except OSError:
  print('refused')
"""


def test_privileges_cannot_be_had(bwrap):
  result = bwrap.run(_PRIVILEGES)
  assert result.succeeded, result.output
  assert result.output.count('refused') == 4
  assert result.output.count('unshare -1') == 3
  assert 'mount -1' in result.output
  assert result.output.startswith('65534 ')
  assert result.output.count('0000000000000000') == 5
  assert 'ESCAPED' not in result.output


def test_the_program_holds_nothing_of_ours(bwrap):
  result = bwrap.run(
    'import glob, os\n'
    'for path in glob.glob("/proc/self/fd/*"):\n'
    '  if "program" in os.path.realpath(path):\n'
    '    print("ESC" + "APED")\n'
    'print(os.environ.get("PATH"), sorted(os.environ))'
  )
  assert result.succeeded
  assert 'ESCAPED' not in result.output
  assert 'PYTHONPATH' not in result.output


def test_a_program_that_says_it_is_the_sandbox_is_told_apart(bwrap):
  assert bwrap.run('print("bwrap: hello")').succeeded
  with pytest.raises(taxonomy.SandboxError, match='did not start'):
    bwrap.run('print("bwrap: no")\nraise SystemExit(1)')


def test_nothing_runs_without_a_sandbox(monkeypatch):
  monkeypatch.setattr(shutil, 'which', lambda name: None)
  bubblewrap._problem.cache_clear()
  try:
    with pytest.raises(errors.UserError, match='bwrap is not installed'):
      bubblewrap.Bubblewrap(_LIMITS)
  finally:
    bubblewrap._problem.cache_clear()

  def fails(words):
    raise errors.UserError(words)

  with pytest.raises(errors.UserError) as raised:
    sandbox.first_that_works(
      {'a': lambda: fails('no bwrap'), 'b': lambda: fails('no monty')}
    )
  text = str(raised.value)
  assert 'runs in a sandbox or not at all' in text
  assert 'a (no bwrap); b (no monty)' in text
  assert 'apt-get install bubblewrap' in text


def test_the_first_that_works_is_found():
  made = sandbox.find(_LIMITS)
  with contextlib.closing(made):
    assert made.run('print(6 * 7)').output == '42\n'


def test_bad_limits_are_refused():
  with pytest.raises(errors.UserError, match='wall_s'):
    sandbox.Limits(wall_s=0)


def test_runs_in_several_threads(box):
  results = []
  threads = [
    threading.Thread(
      target=lambda i=i: results.append(box.run(f'print({i})').output)
    )
    for i in range(6)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert sorted(results) == [f'{i}\n' for i in range(6)]
