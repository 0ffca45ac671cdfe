"""Output onto a full disk or into a closed pipe."""

import errno
import io
import os

import pytest

from launch import streams


class _Broken(io.StringIO):
  def __init__(self, number):
    super().__init__()
    self.number = number

  def write(self, text):
    raise OSError(self.number, os.strerror(self.number))

  def flush(self):
    raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize('number', [errno.ENOSPC, errno.EPIPE])
def test_what_is_not_taken_is_dropped(number):
  stream = streams.ForgivingStream(_Broken(number))
  print('a warning', file=stream, flush=True)


def test_a_device_that_is_always_full_really_raises_and_is_forgiven():
  with pytest.raises(OSError), open('/dev/full', 'w') as full:
    print('a warning', file=full, flush=True)
  full = open('/dev/full', 'w', buffering=1)
  print('a warning', file=streams.ForgivingStream(full), flush=True)
  with pytest.raises(OSError):
    full.close()


def test_other_errors_are_not_hidden():
  stream = streams.ForgivingStream(_Broken(errno.EBADF))
  with pytest.raises(OSError):
    print('to nobody', file=stream)
  with pytest.raises(OSError):
    stream.flush()


def test_all_else_is_passed_on():
  inner = io.StringIO()
  stream = streams.ForgivingStream(inner)
  print('words', file=stream, flush=True)
  assert inner.getvalue() == stream.getvalue() == 'words\n'
  assert not stream.isatty()
