"""Permits by hand."""

from tunix_reverb import core
from tunix_reverb import types


class Permits(core.PermitSource):
  """Gives permits when the test says so.

  Attributes:
    asked: permits requested and not given yet.
    given: ids of those given.
    returned: ids given back.
  """

  def __init__(self):
    self.asked = 0
    self.given = []
    self.returned = None
    self._come = []

  def give(self, count=1, version=1):
    assert count <= self.asked, 'more were taken than were asked for'
    for _ in range(count):
      self.given.append(1000 + len(self.given))
      self._come.append(types.Permit(self.given[-1], version))
    self.asked -= count

  def request(self, count):
    assert count > 0
    self.asked += count

  def take(self, timeout_s):
    come, self._come = self._come, []
    return come

  def close(self, held=()):
    untaken, self._come = self._come, []
    self.returned = [*held, *(permit.permit_id for permit in untaken)]
