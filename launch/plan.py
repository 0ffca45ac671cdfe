"""Says without hardware whether a transformer's update fits, and its speed.

  --model=llama3-70b --topology=v5p-256

Compiles the learner's update from shapes alone and prints bytes per device,
collectives, FLOPs, and bounds of its time. Mesh axes that are not given are
suggested. Of what does not fit it says by how much, and what to change; each
change has been compiled, too. Exit status: 0 if it fits, 1 if it does not, 2
for a mistake in the flags.
"""

from __future__ import annotations

import os

from absl import flags as absl_flags

from launch import app
from launch import plan_flags
from tunix_reverb.sharding import topologies

# At least; what does not fit is tried on larger topologies.
_NUM_DEVICES = 512
# Lifts the conversion of all that is kept in bfloat16 out of the loop over the
# layers: CPUs compute in float32. It would count as memory that a TPU needs.
_DISABLED_PASS = 'while-loop-invariant-code-motion'


def _run() -> int:
  """Prints the plan; returns the exit status."""
  topology = topologies.parse(absl_flags.FLAGS.topology)
  _set_environment(topology)
  # Here, so that --help and a bad flag answer at once.
  from tunix_reverb.agents.transformer.plan import changes
  from tunix_reverb.agents.transformer.plan import meshes
  from tunix_reverb.agents.transformer.plan import plan as plan_lib
  from tunix_reverb.agents.transformer.plan import report

  request = plan_flags.request(topology)
  limit_bytes = _limit_bytes(topology)
  plan = plan_lib.make(
    meshes.suggest(request, limit_bytes),
    limit_bytes=limit_bytes,
    compiler=absl_flags.FLAGS.compiler,
  )
  print(report.describe(plan), flush=True)
  if plan.fits:
    return 0
  print('what makes it fit, compiled for cpu:', flush=True)
  found = False
  for change in changes.find(plan, request):
    print(report.describe_change(change), flush=True)
    found = True
  if not found:
    print('  nothing that was tried')
  return 1


def _limit_bytes(topology: topologies.Topology) -> float:
  """Memory of a device."""
  if topology.chip is not None:
    return topology.chip.memory_bytes
  # Virtual devices share what this machine has.
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  return memory / topology.num_chips


def _set_environment(topology: topologies.Topology) -> None:
  num_devices = max(topology.num_chips, _NUM_DEVICES)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['XLA_FLAGS'] = ' '.join(
    (
      os.environ.get('XLA_FLAGS', ''),
      f'--xla_force_host_platform_device_count={num_devices}',
      f'--xla_disable_hlo_passes={_DISABLED_PASS}',
    )
  ).strip()
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  # Or else libtpu looks for them on the network, and complains.
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  os.environ['TPU_WORKER_HOSTNAMES'] = 'localhost'
  os.environ['TPU_ACCELERATOR_TYPE'] = topology.name
  # There is no TPU of which two processes could get into each other's way.
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'


def main() -> None:
  """Entry point."""
  plan_flags.define()
  app.run_command(_run, name='plan')


if __name__ == '__main__':
  main()
