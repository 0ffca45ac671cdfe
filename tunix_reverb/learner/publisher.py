"""Publishes variables in the background, so that an update never waits."""

from __future__ import annotations

import logging
import threading
import time

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types


class Publisher:
  """Hands variables to a sink in a thread of its own, one at a time.

  A publish that is unconfirmed after `timeout_s` seconds is logged and left to
  the sink, which keeps trying until newer variables come: a replay server that
  is restarted gets them once it is back.
  """

  def __init__(self, sink: core.VariableSink, *, timeout_s: float = 30.0):
    """Starts the thread, which publishes to `sink`."""
    self._sink = sink
    self._timeout_s = timeout_s
    self.publish_s = 0.0  # Seconds that the last publish took.
    self._next: types.Variables | None = None
    self._wake = threading.Condition()
    self._confirmed_version = 0
    self._busy = False
    self._closed = False
    self._error: BaseException | None = None
    self._thread = threading.Thread(
      target=self._run, name='publisher', daemon=True
    )
    self._thread.start()

  @property
  def idle(self) -> bool:
    """Whether the last publish is through, so that the next may be offered.

    Raises:
      RuntimeError: a publish failed; the cause is chained.
    """
    if self._error is not None:
      raise RuntimeError('publishing the variables failed') from self._error
    with self._wake:
      return self._next is None and not self._busy

  @property
  def confirmed_version(self) -> int:
    """The newest version that others can get; of the last one once idle."""
    with self._wake:
      if self._next is None and not self._busy:
        late = self._sink.confirmed_version
        self._confirmed_version = max(self._confirmed_version, late)
      return self._confirmed_version

  def offer(self, variables: types.Variables) -> None:
    """Publishes `variables` next; call only when `idle`."""
    with self._wake:
      self._next = variables
      self._wake.notify()

  def wait(self, timeout_s: float) -> bool:
    """Waits until all is published; returns False at the deadline."""
    with self._wake:
      return self._wake.wait_for(
        lambda: (
          self._error is not None or (self._next is None and not self._busy)
        ),
        timeout_s,
      )

  def close(self, timeout_s: float) -> None:
    """Stops after the publish under way."""
    with self._wake:
      self._closed = True
      self._wake.notify()
    self._thread.join(timeout_s)

  def _run(self) -> None:
    while True:
      with self._wake:
        self._wake.wait_for(lambda: self._next is not None or self._closed)
        if self._next is None:
          return
        variables, self._next, self._busy = self._next, None, True
      began_s = time.monotonic()
      confirmed = 0
      try:
        self._sink.publish(variables, self._timeout_s)
        confirmed = variables.policy_version
        self.publish_s = time.monotonic() - began_s
      except errors.DeadlineExceededError as e:
        self.publish_s = time.monotonic() - began_s
        logging.warning('%s; training goes on', e)
      except BaseException as e:  # Raised again in the learner's thread.
        self._error = e
      finally:
        with self._wake:
          self._busy = False
          self._confirmed_version = max(self._confirmed_version, confirmed)
          self._wake.notify_all()
      if self._error is not None:
        return
