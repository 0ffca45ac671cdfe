"""Checks an environment with random actions and prints what would be stored.

  --environment=gym:CartPole-v1 --num_steps=1000

A task of turns that has a scripted policy is played by it, too: what the random
and the scripted policy earn are the bounds of what can be learnt.

Exit status: 0 if the environment keeps its contract, 1 with a line for each
violation, 2 for a mistake in the flags.
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import sys

from absl import flags as absl_flags
from absl import logging

from launch import app

_ENVIRONMENT = absl_flags.DEFINE_string(
  'environment',
  'catch',
  'catch, bsuite:<id>, gym:<id>, atari:<game>, dm_control:<domain>/<task>, '
  'envpool:<id>, tool:<task>, reasoning_gym:<dataset>, or module:factory.',
)
_MODEL = absl_flags.DEFINE_string(
  'model',
  '',
  'Pretrained model, a directory or .gguf file, whose tokeniser and chat '
  'template an environment of turns is played in; characters if empty.',
)
_NUM_STEPS = absl_flags.DEFINE_integer(
  'num_steps', 1000, 'Random actions to take.', lower_bound=1
)
_SEED = absl_flags.DEFINE_integer(
  'seed', 0, 'Seed of the environment and of the actions.', lower_bound=0
)


def _run() -> int:
  """Checks and prints; returns the exit status."""
  # Imported here, so that --help and a bad flag answer at once.
  from tunix_reverb import specs
  from tunix_reverb.environments import bounds
  from tunix_reverb.environments import canonical
  from tunix_reverb.environments import check
  from tunix_reverb.environments import factory
  from tunix_reverb.environments import turn_factory
  from tunix_reverb.environments.tools import statistics
  from tunix_reverb.text import huggingface

  name, model = _ENVIRONMENT.value, _MODEL.value
  chat_format = huggingface.open_format(model) if model else None
  tools = statistics.ToolStatistics()
  options = turn_factory.TurnOptions(
    chat_format=chat_format, on_episode=tools.add
  )
  environment = factory.load(name, seed=_SEED.value, turn_options=options)
  try:
    environment_spec = specs.make_environment_spec(
      canonical.canonicalise(environment)
    )
    report = check.check(
      environment, num_steps=_NUM_STEPS.value, seed=_SEED.value
    )
    scripted = bounds.describe(environment, report, tools)
  finally:
    environment.close()
  print(f'environment {name}')
  for field, spec in zip(environment_spec._fields, environment_spec):
    print(f'  {field:12} {spec}')
  _print('random policy', check.describe(report))
  if scripted:
    _print('turns', scripted)
  _print('stored in replay', check.describe_columns(environment_spec))
  if report.violations:
    _print(f'{len(report.violations)} violations', report.violations)
    return 1
  print('ok: every timestep agrees with the specs')
  return 0


def _print(title: str, lines: Sequence[str]) -> None:
  print(title)
  for line in lines:
    print(f'  {line}')


def main() -> None:
  """Entry point."""
  # Nothing is rendered here; without this, importing dm_control looks for a
  # display.
  os.environ.setdefault('MUJOCO_GL', 'disabled')
  # An environment of the user's own may lie in the working directory.
  sys.path.insert(0, os.getcwd())
  # INFO lines of the environments' libraries would bury the answer.
  logging.set_verbosity(logging.WARNING)
  app.run_command(_run, name='check_environment')


if __name__ == '__main__':
  main()
