"""What an actor did since the last report, as metrics."""

from __future__ import annotations

from collections.abc import Callable
import time

from tunix_reverb import core
from tunix_reverb.actor import loop as loop_lib


class ActorReport:
  """Gathers the metrics of an actor's loop."""

  def __init__(
    self,
    loop: loop_lib.ActorLoop,
    *,
    writer: core.ItemWriter,
    variables: core.VariableSource,
    items_total: Callable[[], int],
    failures_total: Callable[[], int],
  ):
    """Reports on `loop`.

    Args:
      loop: the actor's loop.
      writer: of its items.
      variables: where its variables come from.
      items_total: items written so far.
      failures_total: environments replaced so far.
    """
    self._loop = loop
    self._writer = writer
    self._variables = variables
    self._items_total = items_total
    self._failures_total = failures_total
    self._episodes = 0
    self._steps = 0
    self._since_s = time.monotonic()

  def take(self) -> dict[str, float]:
    """The metrics since the last call."""
    loop, now_s = self._loop, time.monotonic()
    episodes = loop.statistics.take()
    self._episodes += len(episodes)
    steps = loop.actor_steps - self._steps
    metrics = {
      'actor_steps_per_s': steps / max(now_s - self._since_s, 1e-9),
      'actor_steps_total': loop.actor_steps,
      'episodes_total': self._episodes,
      'policy_version': loop.policy_version,
      'blocked_s_total': self._writer.blocked_s(),
      'blocked_by_network_s_total': self._writer.blocked_by_network_s(),
      'variables_age_s': self._variables.age_s(),
      'items_total': self._items_total(),
      'environment_failures_total': self._failures_total(),
      'parked_environments': loop.num_parked,
      **loop.metrics(),
    }
    for name, fraction in loop.account.take().items():
      if name != 'other':
        metrics[f'utilisation_{name}'] = fraction
    if episodes:
      count = len(episodes)
      metrics['episode_return_mean'] = sum(e[1] for e in episodes) / count
      metrics['episode_length_mean'] = sum(e[2] for e in episodes) / count
    self._steps, self._since_s = loop.actor_steps, now_s
    return metrics
