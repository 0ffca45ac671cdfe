"""Writes a run's model as a directory that `transformers` loads.

  --checkpoint=runs/a --output=my_model --dtype=bfloat16

The params are those of the run's newest checkpoint. A run that began with a
pretrained model gives its tokeniser and chat template, too. `--model=my_model/`
goes on from there: the value head lies beside the tensors.
"""

from __future__ import annotations

import pathlib

from absl import flags as absl_flags
from absl import logging

from launch import app
from launch import flags
from tunix_reverb import errors


def define_flags() -> None:
  """Not when this is imported: evaluators have a flag of the same name."""
  absl_flags.DEFINE_string(
    'checkpoint', None, 'A run directory, or its checkpoints/learner.'
  )
  absl_flags.DEFINE_string(
    'output', None, 'Directory to write; must not hold a model.'
  )
  absl_flags.DEFINE_enum(
    'dtype',
    'bfloat16',
    ['bfloat16', 'float16', 'float32'],
    'Dtype of the tensors that are written; those of a run are float32.',
  )


def _run() -> None:
  """Reads and writes."""
  given = flags.FLAGS
  for name in ('checkpoint', 'output'):
    if not given[name].value:
      raise errors.UserError(f'--{name} must name a directory')
  config = flags.config_from_flags()
  if config.agent != 'transformer':
    raise errors.UserError(
      f'agent ({config.agent!r}) must be transformer: other networks have no '
      'format that others read'
    )
  app.set_environment('export_model')
  logging.set_verbosity(logging.WARNING)
  # Here, so that --help and a bad flag answer at once.
  from tunix_reverb.agents import builder
  from tunix_reverb.agents.transformer import pretrained

  agent = builder.make_agent(config)
  variables = builder.load_variables(
    config, agent, pathlib.Path(given.checkpoint)
  )
  pretrained.export(
    pathlib.Path(given.output),
    config.transformer.model,
    agent.model,
    variables.params,
    dtype=given.dtype,
  )
  print(f'wrote version {variables.policy_version} to {given.output}')


def main() -> None:
  """Entry point."""
  define_flags()
  app.run_command(_run, name='export_model', with_config=True)


if __name__ == '__main__':
  main()
