"""An Acme-style actor: one environment, one observation at a time.

For a plain `dm_env` loop of someone else's; the actor processes of this
package serve many environments at once with `actor.loop`.
"""

from __future__ import annotations

import dm_env
import numpy as np
import tree

from tunix_reverb import core
from tunix_reverb import errors
from tunix_reverb import types
from tunix_reverb.actor import policy as policy_lib


class PolicyActor(core.Actor):
  """Acts with a `BatchedPolicy` of one and records through an `Adder`."""

  def __init__(
    self,
    policy: policy_lib.BatchedPolicy,
    variables: core.VariableSource,
    *,
    adder: core.Adder | None = None,
    variable_timeout_s: float = 60.0,
  ):
    """The first variables are awaited in the first `select_action`.

    Args:
      policy: built with `num_environments=1`.
      variables: where newer variables come from.
      adder: records the interaction; None records nothing.
      variable_timeout_s: longest wait for the first variables, seconds.
    """
    self._policy = policy
    self._variables = variables
    self._adder = adder
    self._timeout_s = variable_timeout_s
    self._ids = np.zeros(1, np.int32)
    self._is_first = np.ones(1, np.bool_)
    self._log_prob = np.float32(0.0)
    self._version = 0

  def select_action(self, observation: types.Nest) -> types.Nest:
    """See base class."""
    if not self._policy.policy_version:
      self.update(wait=True)
    output = self._policy.act(
      self._ids,
      tree.map_structure(lambda x: np.asarray(x)[None], observation),
      self._is_first,
    )
    self._is_first[:] = False
    self._log_prob = output.log_prob[0]
    self._version = self._policy.policy_version
    return tree.map_structure(lambda a: a[0], output.action)

  def observe_first(self, timestep: dm_env.TimeStep) -> None:
    """See base class."""
    self._is_first[:] = True
    if self._adder is not None:
      self._adder.add_first(timestep)

  def observe(self, action: types.Nest, next_timestep: dm_env.TimeStep) -> None:
    """See base class."""
    if self._adder is None:
      return
    not_first = np.zeros(1, np.bool_)
    self._adder.add(
      action,
      next_timestep,
      extras={
        'log_prob': self._log_prob,
        'policy_version': np.int32(self._version),
        'core_state': tree.map_structure(
          lambda s: s[0],
          self._policy.core_state_before(self._ids, not_first),
        ),
      },
    )

  def update(self, wait: bool = False) -> None:
    """See base class.

    Raises:
      errors.DeadlineExceededError: `wait` found no variables in time.
    """
    newer = self._variables.get_variables(
      self._policy.policy_version + 1, self._timeout_s if wait else 0.0
    )
    if newer is not None:
      self._policy.set_variables(newer)
    elif wait and not self._policy.policy_version:
      raise errors.DeadlineExceededError(
        'actor waited for the first variables of the learner for '
        f'{self._timeout_s} s'
      )
