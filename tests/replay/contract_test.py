"""The official clients keep the contracts of the replay interfaces."""

import time

import pytest

from tunix_reverb.replay import clients
from tunix_reverb.replay import tables
from tunix_reverb.replay import test_utils

pytestmark = [pytest.mark.replay, pytest.mark.timeout(60)]

_COLUMNS = test_utils.columns()


class TestOfficialItemWriter(test_utils.ItemWriterContract):
  @pytest.fixture(autouse=True)
  def _serve(self, start_server, closing):
    self._closing = closing
    self._server = start_server(tables.TableConfig(max_items=4))
    self._sampler = None

  def make_writer(self):
    return self._closing(
      clients.make_writer(self._server.address, columns=_COLUMNS), 0.0
    )

  def drain(self, num_items):
    if self._sampler is None:
      self._sampler = self._closing(
        clients.make_sampler(
          [self._server.address],
          columns=_COLUMNS,
          max_in_flight=1,
          queue_size=1,
        )
      )
    return [
      int(self._sampler.sample(20.0).trajectories.episode_id[0])
      for _ in range(num_items)
    ]


class TestOfficialItemSampler(test_utils.ItemSamplerContract):
  @pytest.fixture(autouse=True)
  def _serve(self, start_server, closing):
    self._closing = closing
    self._server = start_server(tables.TableConfig(max_items=4))

  def make_sampler(self):
    return self._closing(
      clients.make_sampler([self._server.address], columns=_COLUMNS)
    )

  def test_close_returns_all_that_was_received(self):
    sampler = self.make_sampler()
    self.fill([test_utils.item(i) for i in range(2)])
    (shard,) = sampler._shards
    deadline_s = time.monotonic() + 20
    while len(shard._items) < 2:
      assert time.monotonic() < deadline_s
      time.sleep(0.01)
    left = [int(i.trajectories.episode_id[0]) for i in sampler.close()]
    assert left == [0, 1]

  def fill(self, items):
    writer = clients.make_writer(self._server.address, columns=_COLUMNS)
    for item in items:
      assert writer.write(item, 10.0)
    assert writer.close(10.0)
