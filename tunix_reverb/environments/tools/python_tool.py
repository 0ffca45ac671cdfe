"""Python for the policy, in a sandbox."""

from __future__ import annotations

import dataclasses

from tunix_reverb.environments.tools import sandbox as sandbox_lib
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool

# Programs at once; more would only take longer each.
_MAX_CONCURRENCY = 4
# Beyond the sandbox's own limit, and a turn of waiting.
_MARGIN_S = 10.0
# Why a sandbox stopped a program, in words for the policy.
REASONS = {
  'time': 'it took too long',
  'memory': 'it needed too much memory',
  'output': 'it printed too much',
}


@tool.tool(name='python', max_concurrency=_MAX_CONCURRENCY)
def _python(code: str) -> str:
  """Runs a Python program and returns what it prints.

  Nothing is kept between calls; there are no files and no network.

  Args:
    code: of the program.
  """
  # Stands for its signature; `make` puts the sandbox behind it.
  raise taxonomy.SandboxError(f'no sandbox for {len(code)} characters')


def make(sandbox: sandbox_lib.Sandbox) -> tool.Tool:
  """The tool `python`, which runs in `sandbox`."""

  def run(code: str) -> str:
    result = sandbox.run(code)
    if result.stopped is not None:
      raise taxonomy.SandboxError(
        f'the program was stopped: {REASONS[result.stopped]}\n{result.output}'
      )
    return result.output

  limits = dataclasses.replace(
    _python.limits, timeout_s=2 * sandbox.limits.wall_s + _MARGIN_S
  )
  return dataclasses.replace(_python, function=run, limits=limits)
