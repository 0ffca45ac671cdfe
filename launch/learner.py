"""The learner process: updates without pause and publishes variables."""

from __future__ import annotations

import threading
import time

from absl import flags

from launch import app
from launch import columns
from launch import group as group_lib
from launch import shutdown
from launch import topology
from tunix_reverb import errors

group_lib.define_flags()


def run_learner(context: app.RoleContext) -> int:
  """Learns until `max_learner_steps` or until it is told to stop.

  Returns:
    0; under `launch.local` another status if it was told to stop before.
  """
  from tunix_reverb.agents import builder
  from tunix_reverb.agents import session as session_lib
  from tunix_reverb.learner import publisher as publisher_lib
  from tunix_reverb.replay import clients
  from tunix_reverb.telemetry import compiles
  from tunix_reverb.telemetry import milestones as milestones_lib

  compile_counter = compiles.CompileCounter()
  milestones = milestones_lib.Milestones(context.run_dir, context.role)
  milestones.mark('imported')
  config, stop, watchdog = context.config, context.stop, context.watchdog
  given = flags.FLAGS.replay_servers
  addresses = topology.replay_servers(given, context.run_dir)
  group = group_lib.join(context)
  agent = builder.make_agent(config)
  if context.run_dir is not None and group.index == 0:
    columns.write(context.run_dir, agent.columns)
  client = config.replay.replay_client
  with watchdog.waiting('learner waits for XLA to compile its updates'):
    parts = builder.make_learner_parts(config, agent)
  milestones.mark(f'compiled {len(parts.buckets)} buckets')
  clients.connect(
    addresses,
    columns=agent.columns,
    table_config=builder.make_table_config(config),
    watchdog=watchdog,
    stop=stop,
    timeout_s=config.watchdog_s,
    client=client,
  )
  own = group_lib.own_servers(addresses, config)
  sampler = clients.make_sampler(own, columns=agent.columns, client=client)
  publisher = None
  if group.index == 0:
    sink = clients.make_variable_sink(
      addresses[0], run_dir=context.run_dir, client=client
    )
    publisher = publisher_lib.Publisher(sink)
  permit_table = builder.make_permit_table(config, addresses)
  session = session_lib.LearnerSession(
    config,
    agent,
    parts,
    sampler=sampler,
    publisher=publisher,
    logger=context.logger,
    watchdog=watchdog,
    milestones=milestones,
    compile_counter=compile_counter,
    run_dir=context.run_dir,
    served_version=clients.served_version(addresses[0], stop, client=client),
    permit_table=permit_table,
    group=group,
  )
  try:
    stops = lambda: (stop.wait(), session.stop())
    threading.Thread(target=stops, name='stop learner', daemon=True).start()
    what = f'learner waits for items of table trajectories of {", ".join(own)}'
    with watchdog.waiting(what), group_lib.ending_alone(context.role):
      session.run()
  finally:
    began_s = time.monotonic()
    unsaved = session.close()
    if publisher is not None:
      publisher.close(timeout_s=1.0)
      sink.close()
    sampler.close()
    if permit_table is not None:
      permit_table.close()
    group_lib.leave(group)
    print(f'learner: closed in {time.monotonic() - began_s:.1f} s', flush=True)
  if unsaved:
    raise errors.CheckpointError(unsaved)
  return 0 if session.is_complete else shutdown.stopped_status()


def main() -> None:
  """Entry point."""
  app.run(
    run_learner,
    role='learner',
    make_role_name=group_lib.given_role_name,
    single_threaded_xla=True,
  )


if __name__ == '__main__':
  main()
