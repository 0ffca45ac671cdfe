"""One actor process: steps environments and writes trajectories."""

from __future__ import annotations

import os
import time

from absl import flags

from launch import app
from launch import topology

flags.DEFINE_integer(
  'actor_id', 0, 'Number of this actor process, from 0; unique in the run.'
)

_REPORT_PERIOD_S = 1.0


def run_actor(context: app.RoleContext, make: str = 'make_acting') -> int:
  """Runs what the agent's method `make` makes until it is told to stop."""
  from tunix_reverb.actor import report as report_lib
  from tunix_reverb.agents import builder
  from tunix_reverb.replay import clients
  from tunix_reverb.telemetry import milestones as milestones_lib

  # Throughput work: it need not interrupt the learner of the same host.
  os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
  milestones = milestones_lib.Milestones(context.run_dir, context.role)
  milestones.mark('imported')
  config, stop, watchdog = context.config, context.stop, context.watchdog
  given = flags.FLAGS
  addresses = topology.replay_servers(given.replay_servers, context.run_dir)
  address = addresses[given.actor_id % len(addresses)]
  agent = builder.make_agent(config)
  client = config.replay.replay_client
  clients.connect(
    [address],
    columns=agent.columns,
    table_config=builder.make_table_config(config),
    watchdog=watchdog,
    stop=stop,
    timeout_s=config.watchdog_s,
    client=client,
  )
  permits = builder.make_permit_source(config, addresses[0])
  writer = clients.make_writer(
    address, columns=agent.columns, client=client, announce=permits is not None
  )
  period_s = config.actor.variable_update_period_s
  variables = clients.make_variable_source(
    addresses[0], period_s=period_s, client=client
  )
  loop, adder, environment = getattr(agent, make)(
    config,
    actor_id=given.actor_id,
    writer=writer,
    variables=variables,
    permits=permits,
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
    report = report_lib.ActorReport(
      loop,
      writer=writer,
      variables=variables,
      items_total=lambda: adder.items_total,
      failures_total=lambda: sum(environment.failures.values()),
    )
    with watchdog.waiting(
      f'{context.role} waits for its environments, or for room in table '
      f'trajectories of {address}'
    ):
      loop.run(_make_keep_going(context, loop, report))
  finally:
    environment.close()
    writer.close(timeout_s=2.0)
    loop.close()
    variables.close()
  return 0


def _make_keep_going(context, loop, report):
  """Writes metrics and sees whether to go on; waiting for permits is going."""
  seen = 0
  next_report_s = time.monotonic() + _REPORT_PERIOD_S

  def keep_going() -> bool:
    nonlocal seen, next_report_s
    if loop.progress > seen or loop.is_waiting:
      seen = loop.progress
      context.watchdog.progress()
    if time.monotonic() >= next_report_s:
      next_report_s = time.monotonic() + _REPORT_PERIOD_S
      context.logger.write(report.take(), loop.actor_steps)
    return not context.stop.is_set()

  return keep_going


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
