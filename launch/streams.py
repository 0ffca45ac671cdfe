"""Output that a full disk or a closed pipe cannot turn into an exception.

A role's stdout and stderr are files in the run directory. On a full disk a
`print` raises, be it the warning that the disk is full: the role would die of
what it was about to survive. In `--help | head`, too, nobody wants the rest.
"""

from __future__ import annotations

import errno
import sys
from typing import Any
from typing import TextIO

_FORGIVEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)


class ForgivingStream:
  """A text stream that drops what the disk or the reader does not take."""

  def __init__(self, stream: TextIO):
    """Wraps `stream`; all else is passed on to it."""
    self._stream = stream

  def write(self, text: str) -> int:
    """Writes `text`, or drops it."""
    try:
      return self._stream.write(text)
    except OSError as e:
      if e.errno not in _FORGIVEN:
        raise
      return len(text)

  def flush(self) -> None:
    """Flushes, as far as it is taken."""
    try:
      self._stream.flush()
    except OSError as e:
      if e.errno not in _FORGIVEN:
        raise

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


def install() -> None:
  """Makes stdout and stderr of this process forgiving."""
  sys.stdout = ForgivingStream(sys.stdout)
  sys.stderr = ForgivingStream(sys.stderr)
