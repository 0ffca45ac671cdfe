"""The experiment config as absl flags, one flag per field.

Flags default to None, "not given", so that a config file can supply the value.
Only the standard library and absl are imported: `--help` and a bad flag answer
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import difflib
import pathlib
import re
import sys
import textwrap
from typing import Any

from absl import flags

from tunix_reverb import errors
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents import flat

FLAGS = flags.FLAGS

# Directories that may hold `config.json`, by the flag that names them.
_DIRECTORY_FLAGS = ('run_dir', 'checkpoint')


class _IntListParser(flags.ArgumentParser):
  """Parses '32,64' into (32, 64)."""

  def parse(self, argument: Any) -> tuple[int, ...]:
    parts = argument.split(',') if isinstance(argument, str) else argument
    try:
      return tuple(int(part) for part in parts)
    except ValueError:
      raise ValueError('must be integers separated by commas') from None

  def flag_type(self) -> str:
    return 'ints, comma-separated'


class _IntListSerializer(flags.ArgumentSerializer):
  def serialize(self, value: Sequence[int]) -> str:
    return ','.join(str(v) for v in value)


def define_config_flags() -> None:
  """Defines the config fields, `--config` and `--run_dir`; idempotent."""
  if 'config' in FLAGS:
    return
  flags.DEFINE_string(
    'config', None, 'JSON file with config fields; given flags override it.'
  )
  flags.DEFINE_string(
    'run_dir', None, 'Directory of the run: config, metrics, checkpoints.'
  )
  for name, (_, field) in flat.scalar_fields().items():
    _define(name, field)


def define_role_flags() -> None:
  """Defines the flags that `launch.local` passes to its roles; idempotent."""
  if 'supervised' in FLAGS:
    return
  flags.DEFINE_list(
    'replay_servers',
    None,
    'Replay servers as host:port,host:port; by default those that '
    '<run_dir>/topology.json names.',
  )
  flags.DEFINE_boolean(
    'supervised',
    False,
    'Set by launch.local: end this process when its parent ends.',
  )


def define_replay_restore_flag() -> None:
  """Defines `--replay_restore` of servers and who starts them; idempotent."""
  if 'replay_restore' in FLAGS:
    return
  flags.DEFINE_enum(
    'replay_restore',
    'auto',
    ['auto', 'discard'],
    'auto: start from the latest loadable checkpoint in run_dir, if there is '
    'one; discard: start empty and move the checkpoints there are to '
    'discarded-<n>/ beside them.',
  )


def parse(argv: Sequence[str]) -> None:
  """Parses `argv` (argv[0] is the program) into FLAGS.

  Raises:
    errors.UserError: an unknown flag, a bad value or a positional argument;
      one line with the closest names or the valid values.
  """
  try:
    rest = FLAGS(list(argv))
  except flags.UnrecognizedFlagError as e:
    close = difflib.get_close_matches(e.flagname, list(FLAGS), n=3)
    hint = f'; did you mean {_join(close)}?' if close else '; see --help'
    raise errors.UserError(f'unknown flag --{e.flagname}{hint}') from None
  except flags.Error as e:
    raise errors.UserError(_value_message(str(e))) from None
  if rest[1:]:
    raise errors.UserError(
      f'unexpected argument ({rest[1]!r}); options are given as --name=value'
    )


def given_flags() -> dict[str, Any]:
  """Values of the config flags that were given, by flat name."""
  return {
    name: FLAGS[name].value
    for name in flat.scalar_fields()
    if FLAGS[name].value is not None
  }


def config_from_flags() -> config_lib.ExperimentConfig:
  """The config file overridden by the flags that were given.

  The file is `--config`, or the `config.json` in `--run_dir` or above
  `--checkpoint`, if there is one.

  Raises:
    errors.UserError: the file is unreadable, or a value is invalid.
  """
  path = _config_path()
  base = {}
  if path is not None:
    base = flat.to_flat(load_config(path))
  return flat.from_flat({**base, **given_flags()})


def load_config(path: pathlib.Path) -> config_lib.ExperimentConfig:
  """Reads a config file.

  Raises:
    errors.UserError: it cannot be read or is invalid; the message names it.
  """
  try:
    return flat.loads(path.read_text())
  except OSError as e:
    raise errors.UserError(
      f'config ({str(path)!r}) must be a readable file: {e.strerror}'
    ) from e
  except errors.UserError as e:
    raise errors.UserError(f'{path}: {e}') from e


def format_flag(name: str, value: Any) -> str:
  """`--name=value` as the command line takes it."""
  if isinstance(value, (tuple, list)):
    value = ','.join(str(v) for v in value)
  return f'--{name}={value}'


def help_text(doc: str, *, with_config: bool = True) -> str:
  """What `--help` prints: `doc`, the role's own flags, then the config's."""
  fields = flat.scalar_fields() if with_config else {}
  own = [
    (flag.name, flag.help, flag.default)
    for module, module_flags in sorted(FLAGS.flags_by_module_dict().items())
    if not module.startswith('absl')
    for flag in module_flags
    if flag.name not in fields
  ]
  lines = [textwrap.dedent(doc).strip(), '', 'Flags:']
  for name, text, default in own:
    lines += _help_entry(name, text, default)
  group = object()
  for name, (next_group, field) in fields.items():
    if next_group != group:
      group = next_group
      lines += ['', f'Config, {group or "experiment"}:']
    lines += _help_entry(name, _field_help(field), field.default)
  return '\n'.join(lines)


def print_help_if_asked(
  argv: Sequence[str], doc: str, *, with_config: bool = True
) -> bool:
  """Prints the help if `argv` asks for it; returns whether it did.

  Args:
    argv: of the process.
    doc: what the binary does.
    with_config: whether it takes the config's flags.
  """
  if not {'--help', '-h', '-help', '--helpfull'} & set(argv[1:]):
    return False
  print(help_text(doc, with_config=with_config))
  sys.stdout.flush()
  return True


def _value_message(message: str) -> str:
  """absl's words for a bad value, with what the field takes instead."""
  message = ' '.join(message.split())
  match = re.fullmatch(r'flag --(\w+)=(.*?): (.*)', message)
  _, field = flat.scalar_fields().get(match and match[1], (None, None))
  if field is None or field.metadata['choices']:
    return message
  kind = FLAGS[field.name].flag_type()
  return f'flag --{match[1]}={match[2]}: must be of type {kind}'


def _define(name: str, field: dataclasses.Field) -> None:
  default = field.default
  text = f'{_field_help(field)} Default: {_serialise(default)}.'
  if field.metadata['choices']:
    flags.DEFINE_enum(name, None, list(field.metadata['choices']), text)
  elif isinstance(default, tuple):
    flags.DEFINE(
      _IntListParser(), name, None, text, serializer=_IntListSerializer()
    )
  elif isinstance(default, str):
    flags.DEFINE_string(name, None, text)
  elif isinstance(default, bool):
    flags.DEFINE_boolean(name, None, text)
  elif isinstance(default, int):
    flags.DEFINE_integer(name, None, text)
  else:
    flags.DEFINE_float(name, None, text)


def _config_path() -> pathlib.Path | None:
  if FLAGS.config:
    return pathlib.Path(FLAGS.config)
  for flag in _DIRECTORY_FLAGS:
    if flag in FLAGS and FLAGS[flag].value:
      directory = pathlib.Path(FLAGS[flag].value).absolute()
      for candidate in (directory, *directory.parents[:2]):
        if (candidate / 'config.json').exists():
          return candidate / 'config.json'
        if flag == 'run_dir':
          break
  return None


def _field_help(field: dataclasses.Field) -> str:
  choices = field.metadata['choices']
  return field.metadata['help'] + (
    f' One of: {", ".join(choices)}.' if choices else ''
  )


def _help_entry(name: str, text: str, default: Any) -> list[str]:
  shown = '' if default is None else f' (default: {_serialise(default)})'
  wrapped = textwrap.wrap(f'{text}{shown}', 72)
  return [f'  --{name}', *(f'      {line}' for line in wrapped)]


def _serialise(value: Any) -> str:
  return format_flag('', value).partition('=')[2]


def _join(names: Sequence[str]) -> str:
  return ' or '.join(f'--{name}' for name in names)
