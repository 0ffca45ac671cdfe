"""Shows what was said in a run's evaluation episodes.

  --run_dir=runs/a --last=5

Of `<run_dir>/transcripts.jsonl`, the episodes that ended last come last. With
--tokens each turn of the policy is shown as its tokens, too.
"""

from __future__ import annotations

import pathlib

from absl import flags as absl_flags

from launch import app
from launch import flags
from tunix_reverb import errors


def define_flags() -> None:
  """Not when this is imported: roles have a flag of the same name."""
  absl_flags.DEFINE_string('run_dir', None, 'A run directory.')
  absl_flags.DEFINE_integer(
    'last', 3, 'Episodes to show, the newest of them.', lower_bound=1
  )
  absl_flags.DEFINE_integer(
    'policy_version', 0, 'Only episodes of this version; 0 shows all.'
  )
  absl_flags.DEFINE_boolean('tokens', False, 'Shows the tokens of each turn.')


def _run() -> None:
  """Reads and prints."""
  from tunix_reverb.telemetry import transcripts

  given = flags.FLAGS
  if not given.run_dir:
    raise errors.UserError('--run_dir must name a run directory')
  found = transcripts.read(pathlib.Path(given.run_dir))
  if given.policy_version:
    found = [t for t in found if t['policy_version'] == given.policy_version]
  if not found:
    raise errors.UserError(
      f'run_dir ({given.run_dir}) must hold transcripts'
      + (f' of version {given.policy_version}' if given.policy_version else '')
      + ': only environments of turns have them, once they were evaluated'
    )
  for transcript in found[-given.last :]:
    print(transcripts.render(transcript, with_tokens=given.tokens))


def main() -> None:
  """Entry point."""
  define_flags()
  app.run_command(_run, name='transcripts')


if __name__ == '__main__':
  main()
