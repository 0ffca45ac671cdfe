"""What goes wrong in an episode, by whose doing it was.

  parser       the policy wrote a call that nobody can make
  tool         the tool was called and said no
  sandbox      what runs the tool's code stopped it or broke
  timeout      the tool did not answer in time
  environment  the task or the environment itself raised; the episode is cut

All but the last become an observation from which the policy can learn.
"""

from __future__ import annotations

KINDS = ('parser', 'tool', 'sandbox', 'timeout', 'environment')


class ToolError(Exception):
  """A tool's refusal, in words for the policy.

  Attributes:
    kind: one of `KINDS`.
    is_transient: whether the same call may well succeed a moment later.
  """

  kind = 'tool'

  def __init__(self, message: str, *, is_transient: bool = False):
    """Args: message: what the policy reads. is_transient: see the class."""
    super().__init__(message)
    self.is_transient = is_transient


class CallError(ToolError):
  """A call with a wrong name or wrong arguments."""

  kind = 'parser'


class SandboxError(ToolError):
  """Code was stopped at a limit, or the sandbox did not start."""

  kind = 'sandbox'


class ToolTimeoutError(ToolError):
  """No answer in time."""

  kind = 'timeout'
