"""One contract, two clients: writers, samplers and questions to a server."""

import threading
import time

import pytest

from tunix_reverb import errors
from tunix_reverb.replay import client_names
from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

pytestmark = pytest.mark.timeout(60)

_COLUMNS = test_utils.columns()

# Of a sampler that keeps as little as it can.
_NO_PREFETCH = {
  client_names.WIRE: {'max_in_flight': 1},
  client_names.OFFICIAL: {'max_in_flight': 1, 'queue_size': 1},
}


def _episode(sampled) -> int:
  return int(sampled.trajectories.episode_id[0])


class TestItemWriter(test_utils.ItemWriterContract):
  @pytest.fixture(autouse=True)
  def _serve(self, serve, client, make_writer, make_sampler):
    self._server = serve(tables.TableConfig(max_items=4))
    self._make_writer = make_writer
    self._make_sampler = lambda: make_sampler(
      self._server.address, **_NO_PREFETCH[client]
    )
    self._sampler = None

  def make_writer(self):
    return self._make_writer(self._server.address)

  def drain(self, num_items):
    if self._sampler is None:
      self._sampler = self._make_sampler()
    return [_episode(self._sampler.sample(20.0)) for _ in range(num_items)]

  def test_an_unknown_table_is_refused_with_those_there_are(self):
    writer = self._make_writer(self._server.address, table='nope')
    with pytest.raises(errors.SpecMismatchError) as raised:
      while True:
        writer.write(test_utils.item(), 1.0)
    assert f"{self._server.address} must serve a table 'nope'" in str(
      raised.value
    )
    assert 'trajectories, variables' in str(raised.value)


class TestItemSampler(test_utils.ItemSamplerContract):
  @pytest.fixture(autouse=True)
  def _serve(self, serve, make_writer, make_sampler, client):
    self._server = serve(tables.TableConfig(max_items=4))
    self._client = client
    self._make_writer = make_writer
    self._make_sampler = make_sampler

  def make_sampler(self):
    return self._make_sampler(self._server.address)

  def fill(self, items):
    writer = self._make_writer(self._server.address)
    for item in items:
      assert writer.write(item, 10.0)
    assert writer.close(10.0)

  def _samples(self) -> int:
    states = clients.limiter_state(
      self._server.address, 5.0, client=self._client
    )
    return states[tables.TRAJECTORIES].samples_completed

  def test_close_returns_all_that_was_received(self):
    sampler = self.make_sampler()
    self.fill([test_utils.item(i) for i in range(2)])
    deadline_s = time.monotonic() + 20.0
    (shard,) = sampler._shards
    while len(shard._items) < 2:
      assert time.monotonic() < deadline_s
      time.sleep(0.01)
    assert [_episode(item) for item in sampler.close()] == [0, 1]

  def test_prefetching_is_bounded(self):
    server = self._server
    sampler = self._make_sampler(server.address, **_NO_PREFETCH[self._client])
    bound = sum(_NO_PREFETCH[self._client].values())
    self.fill([test_utils.item(i) for i in range(4)])
    for taken in range(4):
      # The one in its hand comes on top for the official client.
      assert self._samples() <= min(taken + bound + 1, 4)
      assert _episode(sampler.sample(20.0)) == taken

  def test_an_unknown_table_gives_nothing_and_is_counted(self):
    sampler = self._make_sampler(self._server.address, table='nope')
    deadline_s = time.monotonic() + 20.0
    while not sampler.broken_streams:
      assert time.monotonic() < deadline_s
      assert sampler.sample(0.1) is None


_CONFIGS = {
  'queue': tables.TableConfig(max_items=4),
  'ratio': tables.TableConfig(
    mode='replay', max_items=7, min_items=2, samples_per_insert=3.0
  ),
  'prioritised': tables.TableConfig(
    mode='replay', sampler='prioritised', priority_exponent=0.6, max_items=8
  ),
  'permits': tables.TableConfig(balance=tables.PERMIT_BALANCE),
}


@pytest.mark.parametrize('name', _CONFIGS)
def test_a_server_is_described_as_it_was_configured(serve, client, name):
  server = serve(_CONFIGS[name])
  served = clients.describe(server.address, 5.0, client=client)
  ours = tables.describe(_CONFIGS[name], _COLUMNS)
  assert tables.differences(ours, served[tables.TRAJECTORIES], 'it') == []
  assert served[tables.TRAJECTORIES].signature == ours.signature
  for other, config in _CONFIGS.items():
    call = lambda config=config: clients.check_signature(
      server.address, _COLUMNS, config, 5.0, client=client
    )
    if other == name:
      call()
    else:
      with pytest.raises(errors.SpecMismatchError, match='must agree'):
        call()


def test_the_limiters_state_follows_what_happens(
  serve, client, make_writer, make_sampler
):
  server = serve(tables.TableConfig(max_items=4))

  def state() -> tables.LimiterState:
    states = clients.limiter_state(server.address, 5.0, client=client)
    return states[tables.TRAJECTORIES]

  before = state()
  assert (before.current_size, before.max_size) == (0, 4)
  assert before.can_insert and not before.can_sample
  writer = make_writer(server.address)
  for i in range(4):
    assert writer.write(test_utils.item(i), 10.0)
  assert writer.close(10.0)
  full = state()
  assert (full.current_size, full.inserts_completed) == (4, 4)
  assert full.can_sample and not full.can_insert
  sampler = make_sampler(server.address)
  for _ in range(4):
    assert sampler.sample(10.0) is not None
  after = state()
  assert (after.current_size, after.samples_completed) == (0, 4)
  assert after.can_insert and not after.can_sample


def test_waiting_for_a_server_ends_when_it_comes(serve, client):
  server = serve()
  assert clients.wait_for_server(server.address, 20.0, client=client)


def test_waiting_for_a_server_ends_when_told_to(client):
  stop = threading.Event()
  timer = threading.Timer(0.3, stop.set)
  timer.start()
  start_s = time.monotonic()
  assert not clients.wait_for_server('localhost:1', 60.0, stop, client=client)
  assert time.monotonic() - start_s < 3.0
  timer.join()


@pytest.mark.replay
def test_both_clients_refuse_in_the_same_words(serve):
  server = serve(tables.TableConfig(max_items=4))
  texts = set()
  for client in client_names.CLIENTS:
    with pytest.raises(errors.SpecMismatchError) as raised:
      clients.check_signature(
        server.address,
        test_utils.columns(observation_size=5)._replace(core_state=()),
        tables.TableConfig(mode='replay', max_items=8),
        5.0,
        client=client,
      )
    texts.add(str(raised.value))
  assert len(texts) == 1
