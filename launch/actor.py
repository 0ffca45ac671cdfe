"""One actor process: steps environments and writes trajectories."""

from __future__ import annotations

import time

from absl import flags

from launch import app
from launch import topology

flags.DEFINE_integer(
    'actor_id', 0, 'Number of this actor process, from 0; unique in the run.'
)

_REPORT_PERIOD_S = 1.0


def run_actor(context: app.RoleContext) -> int:
  """Runs the actor until it is told to stop."""
  from tunix_reverb.agents.vtrace import builder
  from tunix_reverb.replay import clients
  from tunix_reverb.telemetry import milestones as milestones_lib

  milestones = milestones_lib.Milestones(context.run_dir, context.role)
  milestones.mark('imported')
  config, stop, watchdog = context.config, context.stop, context.watchdog
  addresses = topology.replay_servers(
      flags.FLAGS.replay_servers, context.run_dir
  )
  actor_id = flags.FLAGS.actor_id
  address = addresses[actor_id % len(addresses)]
  agent = builder.make_agent_spec(config)
  clients.connect(
      [address],
      columns=agent.columns,
      table_config=builder.make_table_config(config),
      watchdog=watchdog,
      stop=stop,
      timeout_s=config.watchdog_s,
  )
  writer = clients.make_writer(address, columns=agent.columns)
  variables = clients.make_variable_source(
      addresses[0], period_s=config.actor.variable_update_period_s
  )
  loop, adder, environment = builder.make_actor_loop(
      config,
      agent,
      actor_id=actor_id,
      writer=writer,
      variables=variables,
      keep_waiting=lambda: not stop.is_set(),
  )
  milestones.mark('environments and policy are ready')
  try:
    with watchdog.waiting(
        f'{context.role} waits for the first variables of {addresses[0]}'
    ):
      while not stop.is_set() and not loop.wait_for_variables(0.2):
        pass
    milestones.mark('acts')
    report = _Report(context, loop, adder, writer, environment)
    with watchdog.waiting(
        f'{context.role} waits for its environments, or for room in table '
        f'trajectories of {address}'
    ):
      loop.run(report.keep_going)
  finally:
    environment.close()
    writer.close(timeout_s=2.0)
    variables.close()
  return 0


class _Report:
  """Writes the actor's metrics once a second, and sees whether to go on."""

  def __init__(self, context, loop, adder, writer, environment):
    self._context = context
    self._loop = loop
    self._adder = adder
    self._writer = writer
    self._environment = environment
    self._episodes = 0
    self._steps = 0
    self._since_s = time.monotonic()

  def keep_going(self) -> bool:
    """Called once per policy call."""
    if self._loop.actor_steps > self._steps:
      self._context.watchdog.progress()
    now_s = time.monotonic()
    if now_s - self._since_s >= _REPORT_PERIOD_S:
      self._write(now_s)
    return not self._context.stop.is_set()

  def _write(self, now_s: float) -> None:
    loop = self._loop
    episodes = loop.statistics.take()
    self._episodes += len(episodes)
    steps = loop.actor_steps - self._steps
    metrics = {
        'actor_steps_per_s': steps / (now_s - self._since_s),
        'actor_steps_total': loop.actor_steps,
        'episodes_total': self._episodes,
        'policy_version': loop.policy_version,
        'blocked_s_total': self._writer.blocked_s(),
        'items_total': self._adder.items_total,
        'environment_failures_total': sum(self._environment.failures.values()),
    }
    for name, fraction in loop.account.take().items():
      if name != 'other':
        metrics[f'utilisation_{name}'] = fraction
    if episodes:
      metrics['episode_return_mean'] = sum(e[1] for e in episodes) / len(
          episodes
      )
      metrics['episode_length_mean'] = sum(e[2] for e in episodes) / len(
          episodes
      )
    self._context.logger.write(metrics, loop.actor_steps)
    self._steps, self._since_s = loop.actor_steps, now_s


def main() -> None:
  """Entry point."""
  app.run(
      run_actor,
      role='actor',
      make_role_name=lambda f: f'actor_{f.actor_id}',
      single_threaded_xla=True,
  )


if __name__ == '__main__':
  main()
