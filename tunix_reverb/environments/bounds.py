"""What a turn environment is worth to a perfect policy, before any training.

A task whose perfect policy earns no more than a random one teaches nothing;
one that its author's perfect policy cannot play is broken.
"""

from __future__ import annotations

import dataclasses

import dm_env
import numpy as np

from tunix_reverb.environments import check
from tunix_reverb.environments.tools import statistics as statistics_lib
from tunix_reverb.environments.tools import taxonomy
from tunix_reverb.environments.tools import tool_environment
from tunix_reverb.environments.tools import transcript as transcript_lib

_NUM_EPISODES = 20


@dataclasses.dataclass
class Oracle:
  """What the scripted policy of a task has played.

  Attributes:
    returns: of its episodes.
    transcript: of the last one.
  """

  returns: list[float]
  transcript: transcript_lib.Transcript


def play_oracle(
  environment: tool_environment.ToolEnvironment, *, num_episodes: int
) -> Oracle | None:
  """Plays episodes with the task's own scripted policy; None if it has none.

  Raises:
    errors.UserError: its turns do not fit the limits.
  """
  returns = []
  for _ in range(num_episodes):
    timestep, total = environment.reset(), 0.0
    while not timestep.last():
      turn = environment.oracle()
      if turn is None:
        return None
      timestep = environment.step(turn)
      total += float(timestep.reward)
    returns.append(total)
  return Oracle(returns, environment.transcript)


def describe(
  environment: dm_env.Environment,
  report: check.Report,
  statistics: statistics_lib.ToolStatistics,
) -> list[str]:
  """Lines about the tools and the scripted policy; none without turns.

  Args:
    environment: to play.
    report: of the random policy. That it earns as much as the scripted one is
      added to its violations.
    statistics: of the environment.
  """
  if not isinstance(environment, tool_environment.ToolEnvironment):
    return []
  oracle = play_oracle(environment, num_episodes=_NUM_EPISODES)
  lines = _describe_calls(statistics.metrics())
  if oracle is None:
    return [
      *lines,
      'the task has no scripted policy: its upper bound is not known',
    ]
  return lines + _describe_oracle(oracle, report)


def _describe_calls(metrics: dict[str, float]) -> list[str]:
  wrong = {kind: metrics[f'{kind}_errors_total'] for kind in taxonomy.KINDS}
  errors = ', '.join(f'{n} {kind}' for kind, n in wrong.items() if n) or 'none'
  lines = [f'{metrics["tool_calls_total"]} calls of tools; errors: {errors}']
  if 'tool_call_s_p50' in metrics:
    lines.append(
      f'a call took {1000 * metrics["tool_call_s_p50"]:.3g} ms in the median, '
      f'{1000 * metrics["tool_call_s_p99"]:.3g} ms at the 99th percentile'
    )
  return lines


def _describe_oracle(oracle: Oracle, report: check.Report) -> list[str]:
  mean = float(np.mean(oracle.returns))
  lines = [
    f'return of the scripted policy: mean {mean:.3f}, min '
    f'{min(oracle.returns):.3f}, max {max(oracle.returns):.3f} in '
    f'{len(oracle.returns)} episodes'
  ]
  if report.returns and mean <= float(np.mean(report.returns)):
    report.violations.append(
      f'the scripted policy ({mean:.3f}) must earn more than the random one '
      f'({np.mean(report.returns):.3f})'
    )
  lines.append('an episode of it:')
  lines += [f'  {line}' for line in _render(oracle.transcript)]
  return lines


def _render(transcript: transcript_lib.Transcript) -> list[str]:
  lines = [
    f'{message["role"]}: {message["content"]}'
    for message in transcript.messages
  ]
  lines.append(
    f'{transcript.outcome} after {len(transcript.turns)} turns and '
    f'{transcript.num_tokens} tokens, return {transcript.total_reward:.3f}'
  )
  return [line for text in lines for line in text.splitlines() or ['']]
