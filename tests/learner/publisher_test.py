"""Publishing in the background: the newest wins, nobody waits, errors show."""

import threading
import time

import numpy as np
import pytest

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.learner import publisher as publisher_lib


class _Sink(core.VariableSink):
  """Remembers versions; waits for `gate`; raises `error` if there is one."""

  def __init__(self, error=None):
    self.versions = []
    self.timeouts_s = []
    self.began = threading.Event()
    self.gate = threading.Event()
    self.gate.set()
    self.error = error
    self.late_version = 0

  @property
  def confirmed_version(self):
    return self.late_version

  def publish(self, variables, timeout_s):
    self.began.set()
    self.gate.wait(20.0)
    if self.error is not None:
      raise self.error
    self.versions.append(variables.policy_version)
    self.timeouts_s.append(timeout_s)


def _variables(version):
  return types.Variables(version, {'w': np.zeros(2, np.float32)})


@pytest.fixture
def make():
  """Makes (sink, publisher); closes them after the test."""
  made = []

  def _make(**kwargs):
    sink = _Sink(kwargs.pop('error', None))
    made.append((sink, publisher_lib.Publisher(sink, **kwargs)))
    return made[-1]

  yield _make
  for sink, publisher in made:
    sink.gate.set()
    publisher.close(5.0)
    assert not publisher._thread.is_alive()


def test_versions_are_published_in_order_and_with_the_deadline(make):
  sink, publisher = make(timeout_s=7.0)
  for version in (1, 2, 3):
    assert publisher.idle
    publisher.offer(_variables(version))
    assert publisher.wait(10.0)
  assert sink.versions == [1, 2, 3]
  assert sink.timeouts_s == [7.0] * 3
  assert 0.0 < publisher.publish_s < 5.0


def test_nobody_waits_and_the_newest_wins_while_one_is_under_way(make):
  sink, publisher = make()
  sink.gate.clear()
  publisher.offer(_variables(1))
  assert sink.began.wait(10.0)
  assert not publisher.idle
  start_s = time.monotonic()
  for version in (2, 3, 4):
    publisher.offer(_variables(version))
  assert not publisher.wait(0.05)
  assert time.monotonic() - start_s < 2.0
  sink.gate.set()
  assert publisher.wait(10.0)
  assert sink.versions == [1, 4]


def test_a_failure_reaches_the_learner_with_its_cause(make):
  cause = errors.ReplayUnavailableError('gone for good')
  _, publisher = make(error=cause)
  publisher.offer(_variables(1))
  publisher.wait(10.0)
  with pytest.raises(RuntimeError, match='publishing') as raised:
    assert publisher.idle
  assert raised.value.__cause__ is cause


def test_an_unconfirmed_publish_is_left_to_the_sink(make):
  sink, publisher = make(error=errors.DeadlineExceededError('not confirmed'))
  for version in (1, 2):
    publisher.offer(_variables(version))
    assert publisher.wait(10.0)
    assert publisher.idle
    sink.error = None  # The server is back.
  assert sink.versions == [2]


def test_close_keeps_its_deadline_while_a_publish_hangs(make):
  sink, publisher = make()
  sink.gate.clear()
  publisher.offer(_variables(1))
  assert sink.began.wait(10.0)
  start_s = time.monotonic()
  publisher.close(0.1)
  assert time.monotonic() - start_s < 2.0


def test_a_version_is_confirmed_when_the_sink_says_so(make):
  sink, publisher = make()
  sink.gate.clear()
  publisher.offer(_variables(3))
  assert sink.began.wait(20.0)
  assert publisher.confirmed_version == 0
  sink.gate.set()
  assert publisher.wait(20.0)
  assert publisher.confirmed_version == 3


def test_a_sink_may_confirm_after_the_deadline(make):
  sink, publisher = make(error=errors.DeadlineExceededError('too slow'))
  publisher.offer(_variables(3))
  assert publisher.wait(20.0)
  assert publisher.confirmed_version == 0
  sink.late_version = 3
  assert publisher.confirmed_version == 3
