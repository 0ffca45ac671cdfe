"""Variables between any two clients, through a real server, come what may."""

import socket
import time

import numpy as np
import pytest

from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.replay import client_names
from tunix_reverb.replay import clients
from tunix_reverb.replay import publications
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils
from tunix_reverb.replay.wire_client import sample_stream
from tunix_reverb.replay.wire_client import variables as wire_variables

pytestmark = pytest.mark.timeout(60)

_WIRE, _OFFICIAL = client_names.WIRE, client_names.OFFICIAL


@pytest.fixture(
  params=[
    (_WIRE, _WIRE),
    pytest.param((_WIRE, _OFFICIAL), marks=pytest.mark.replay),
    pytest.param((_OFFICIAL, _WIRE), marks=pytest.mark.replay),
    pytest.param((_OFFICIAL, _OFFICIAL), marks=pytest.mark.replay),
  ],
  ids='-'.join,
)
def pair(request) -> tuple[str, str]:
  """The client that publishes and the one that fetches."""
  return request.param


def _sink(server, closing, client, **kwargs):
  return closing(
    clients.make_variable_sink(server.address, client=client, **kwargs)
  )


def _source(server, closing, client, period_s=0.01, **kwargs):
  return closing(
    clients.make_variable_source(
      server.address, client=client, period_s=period_s, **kwargs
    )
  )


def _wait_until(condition, timeout_s=20.0):
  deadline_s = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline_s
    time.sleep(0.01)


class TestVariables(test_utils.VariablesContract):
  @pytest.fixture(autouse=True)
  def _serve(self, serve, closing, pair):
    self._closing, self._pair = closing, pair
    self._server = serve()

  def make_sink(self):
    return _sink(self._server, self._closing, self._pair[0])

  def make_source(self):
    return _source(self._server, self._closing, self._pair[1])


def test_thirty_megabytes_in_many_chunks(serve, closing, pair):
  server = serve()
  sink = _sink(server, closing, pair[0], chunk_bytes=1 << 20)
  source = _source(server, closing, pair[1])
  params = {'w': np.random.default_rng(0).random(30 << 18, dtype=np.float32)}
  start_s = time.monotonic()
  sink.publish(types.Variables(1, params), 20.0)
  received = source.get_variables(1, 20.0)
  assert time.monotonic() - start_s < 10.0
  test_utils.assert_trees_equal(received.params, params)


def test_large_variables_go_through_a_file(serve, closing, pair, tmp_path):
  server = serve()
  foreign = tmp_path / 'variables' / 'mine.bin'
  foreign.parent.mkdir()
  foreign.write_text('keep')
  sink = _sink(server, closing, pair[0], run_dir=tmp_path, inline_bytes=1000)
  source = _source(server, closing, pair[1])
  for version in range(1, 6):
    params = {'w': np.full(1000, version, np.float32)}
    sink.publish(types.Variables(version, params), 10.0)
    received = source.get_variables(version, 10.0)
    test_utils.assert_trees_equal(received.params, params)
  assert len(list(foreign.parent.glob('variables-*.bin'))) == 2
  assert foreign.read_text() == 'keep'


def test_a_file_that_was_damaged_is_not_taken(serve, closing, client, tmp_path):
  server = serve()
  sink = _sink(server, closing, client, run_dir=tmp_path, inline_bytes=100)
  sink.publish(types.Variables(1, {'w': np.zeros(1000)}), 10.0)
  (path,) = (tmp_path / 'variables').glob('*.bin')
  with path.open('r+b') as file:
    file.seek(3000)
    file.write(b'x')
  source = _source(server, closing, client)
  _wait_until(lambda: source.damaged)
  assert source.get_variables() is None
  sink.publish(types.Variables(2, {'w': np.ones(1000)}), 10.0)
  assert source.get_variables(2, 10.0).params['w'].all()


def test_a_damaged_item_is_not_taken_and_the_next_one_is(
  serve, closing, client
):
  server = serve()
  sink, source = (
    _sink(server, closing, client),
    _source(server, closing, client),
  )
  sink.publish(types.Variables(1, {'w': np.ones(3)}), 10.0)
  first = source.get_variables(1, 10.0)
  payload = np.frombuffer(b'half of what was published', np.uint8)
  timesteps = publications.pack(
    publications.Publication(payload, 5, time.time()), 10
  )
  transport = closing(wire_variables._Transport(server.address))
  transport.insert(timesteps[:-1], 2)
  _wait_until(lambda: source.damaged)
  transport.insert([[np.zeros(3)]], 3)  # Not even the columns.
  seen = source.damaged
  _wait_until(lambda: source.damaged > seen)
  assert source.get_variables() is first
  sink.publish(types.Variables(4, {'w': np.zeros(3)}), 10.0)
  assert source.get_variables(4, 10.0) is not None


def test_the_age_is_that_of_the_publish(serve, closing, pair):
  server = serve()
  source = _source(server, closing, pair[1])
  assert np.isnan(source.age_s())
  before_s = time.time()
  _sink(server, closing, pair[0]).publish(types.Variables(1, {}), 10.0)
  after_s = time.time()
  assert source.get_variables(1, 10.0) is not None
  # A source that comes later knows no less.
  for one in (source, _source(server, closing, pair[1])):
    assert one.get_variables(1, 10.0) is not None
    now_s, age_s = time.time(), one.age_s()
    assert now_s - after_s - 0.1 < age_s < now_s - before_s + 0.1


def test_the_version_has_a_table_of_its_own(serve, closing, client):
  """Its one item's priority; the newest publish has replaced the others."""
  server = serve()
  sink = _sink(server, closing, client)
  for version in (3, 8):
    sink.publish(types.Variables(version, {'w': np.ones(9)}), 10.0)
  puller = closing(sample_stream.Puller(server.address, tables.POLICY_VERSION))
  (item,) = puller.pull(1, 10.0)
  assert item.priority == 8.0
  assert item.columns[0] == np.int64(8)
  states = clients.limiter_state(server.address, 5.0, client=client)
  assert states[tables.POLICY_VERSION].current_size == 1
  assert states[tables.VARIABLES].current_size == 1


def test_publishing_to_nobody_ends_by_its_deadline_and_heals(
  serve, closing, client
):
  with socket.create_server(('127.0.0.1', 0)) as probe:
    port = probe.getsockname()[1]
  sink = closing(clients.make_variable_sink(f'localhost:{port}', client=client))
  start_s = time.monotonic()
  with pytest.raises(errors.DeadlineExceededError, match=str(port)):
    sink.publish(types.Variables(1, {'w': np.ones(3)}), 0.5)
  assert time.monotonic() - start_s < 2.5
  server = serve(port=port)
  source = _source(server, closing, client)
  assert source.get_variables(1, 30.0).policy_version == 1
  sink.publish(types.Variables(2, {'w': np.ones(3)}), 10.0)
  with pytest.raises(ValueError, match='must be above'):
    sink.publish(types.Variables(2, {'w': np.ones(3)}), 10.0)


def test_variables_without_a_place_are_refused(serve, closing, client):
  sink = _sink(serve(), closing, client, inline_bytes=100)
  with pytest.raises(ValueError, match='give the sink a directory'):
    sink.publish(types.Variables(1, {'w': np.ones(100)}), 10.0)


def test_a_new_learner_may_begin_with_older_versions(serve, closing, pair):
  server = serve()
  source = _source(server, closing, pair[1])
  before = _sink(server, closing, pair[0])
  before.publish(types.Variables(9, {}), 10.0)
  assert source.get_variables(9, 10.0) is not None
  resumed = _sink(server, closing, pair[0])
  resumed.publish(types.Variables(4, {}), 10.0)
  _wait_until(lambda: source.get_variables().policy_version == 4)


@pytest.mark.slow  # Half a minute for each client.
@pytest.mark.timeout(180)
def test_variables_lost_with_a_server_are_published_again(
  start_process, closing, client
):
  server = start_process()
  sink = _sink(server, closing, client)
  source = _source(server, closing, client)
  sink.publish(types.Variables(3, {'w': np.ones(3)}), 10.0)
  assert source.get_variables(3, 10.0) is not None
  server.kill()
  server = start_process(port=server.port)
  late = _source(server, closing, client)
  assert late.get_variables(3, 40.0).policy_version == 3
  assert (
    late.age_s() > source.age_s() - 0.1 > 0
  )  # Of the publish, not the item.
  sink.publish(types.Variables(4, {'w': np.ones(3)}), 40.0)
  assert source.get_variables(4, 40.0).policy_version == 4


def test_closing_while_a_server_is_silent_is_prompt(closing, client):
  """It takes connections and never answers."""
  with socket.create_server(('127.0.0.1', 0)) as silent:
    address = f'127.0.0.1:{silent.getsockname()[1]}'
    sink = clients.make_variable_sink(address, client=client)
    source = clients.make_variable_source(address, client=client)
    with pytest.raises(errors.DeadlineExceededError):
      sink.publish(types.Variables(1, {}), 0.3)
    assert source.get_variables(1, 0.1) is None
    start_s = time.monotonic()
    sink.close()
    source.close()
    assert time.monotonic() - start_s < 2.0
    assert source.get_variables(1, 10.0) is None


def test_a_source_fails_for_good_when_nobody_answers(closing, client):
  source = closing(
    clients.make_variable_source(
      'localhost:1', client=client, unavailable_timeout_s=0.5
    )
  )
  with pytest.raises(errors.ReplayUnavailableError, match='localhost:1'):
    source.get_variables(1, 5.0)
