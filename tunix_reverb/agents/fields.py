"""Fields of a config: their help, and what their values must be.

Only the standard library is imported here, as in `config`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tunix_reverb import errors


def field(default: Any, help_text: str, choices: tuple[str, ...] = ()) -> Any:
  """A field that becomes a flag."""
  return dataclasses.field(
    default=default, metadata={'help': help_text, 'choices': choices}
  )


def require(condition: bool, name: str, value: Any, rule: str) -> None:
  """Raises errors.UserError unless it is so: <name> (<value>) must <rule>."""
  if not condition:
    raise errors.UserError(f'{name} ({value!r}) must {rule}')


def validate_choices(group: Any) -> None:
  """Refuses a value that is not among its field's choices."""
  for field in dataclasses.fields(group):
    choices = field.metadata['choices']
    value = getattr(group, field.name)
    if choices:
      require(
        value in choices, field.name, value, f'be one of {", ".join(choices)}'
      )


def positive(group: Any, *names: str) -> None:
  """Refuses values that are not finite or not above 0."""
  for name in names:
    value = getattr(group, name)
    require(value > 0 and math.isfinite(value), name, value, 'be > 0')


def non_negative(group: Any, *names: str) -> None:
  """Refuses values below 0."""
  for name in names:
    value = getattr(group, name)
    require(value >= 0, name, value, 'be >= 0')
