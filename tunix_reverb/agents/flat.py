"""The config as flat values: what flags give and what `config.json` holds.

Only the standard library is imported here, as in `config`.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
from typing import Any

from tunix_reverb import errors
from tunix_reverb.agents import config as config_lib


def scalar_fields() -> dict[str, tuple[str | None, dataclasses.Field]]:
  """Every flag's name -> (its group or None, its dataclass field)."""
  result: dict[str, tuple[str | None, dataclasses.Field]] = {}
  for field in dataclasses.fields(config_lib.ExperimentConfig):
    if field.name not in config_lib.GROUPS:
      result[field.name] = (None, field)
  for group, cls in config_lib.GROUPS.items():
    for field in dataclasses.fields(cls):
      if field.name in result:
        raise AssertionError(f'two config fields are named {field.name}')
      result[field.name] = (group, field)
  return result


def from_flat(values: Mapping[str, Any]) -> config_lib.ExperimentConfig:
  """Builds a config from flat field values; absent ones take their defaults.

  Raises:
    errors.UserError: an unknown name, a wrong type or an invalid value.
  """
  fields = scalar_fields()
  grouped: dict[str | None, dict[str, Any]] = {}
  for name, value in values.items():
    if name not in fields:
      raise errors.UserError(
        f'config field ({name!r}) must be one of {", ".join(sorted(fields))}'
      )
    group, field = fields[name]
    grouped.setdefault(group, {})[name] = _coerce(name, value, field.default)
  top = grouped.pop(None, {})
  for group, cls in config_lib.GROUPS.items():
    top[group] = cls(**grouped.get(group, {}))
  return config_lib.ExperimentConfig(**top)


def to_flat(config: config_lib.ExperimentConfig) -> dict[str, Any]:
  """All field values by flat name; the inverse of `from_flat`."""
  return {
    name: getattr(getattr(config, group) if group else config, name)
    for name, (group, _) in scalar_fields().items()
  }


def _coerce(name: str, value: Any, default: Any) -> Any:
  """Casts `value`, which may come from JSON, to the type of the default."""
  try:
    if isinstance(default, tuple):
      return tuple(int(v) for v in value)
    if isinstance(default, str):
      if not isinstance(value, str):
        raise ValueError('not a string')
      return value
    if isinstance(default, bool):
      if not isinstance(value, bool):
        raise ValueError('not a bool')
      return value
    if isinstance(default, int):
      if isinstance(value, bool) or int(value) != float(value):
        raise ValueError('not an int')
      return int(value)
    return float(value)
  except (TypeError, ValueError) as e:
    raise errors.UserError(
      f'{name} ({value!r}) must be a {type(default).__name__}'
    ) from e


def dumps(config: config_lib.ExperimentConfig) -> str:
  """The config as JSON text, one flat object."""
  return json.dumps(to_flat(config), indent=2) + '\n'


def loads(text: str) -> config_lib.ExperimentConfig:
  """Reads what `dumps` wrote.

  Raises:
    errors.UserError: not JSON, or an invalid config.
  """
  try:
    values = json.loads(text)
  except json.JSONDecodeError as e:
    raise errors.UserError(f'the config must be JSON: {e}') from e
  if not isinstance(values, dict):
    raise errors.UserError('the config must be one flat JSON object')
  return from_flat(values)
