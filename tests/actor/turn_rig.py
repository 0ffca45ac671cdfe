"""Turn environments by script, and what plays them."""

import threading

import dm_env
from dm_env import specs as dm_specs
import jax
import numpy as np

from tunix_reverb import core
from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.actor import engine as engine_lib
from tunix_reverb.actor import permit_line
from tunix_reverb.actor import turn_loop
from tunix_reverb.environments import turns
from tunix_reverb.environments import vector
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.replay import test_utils
from tunix_reverb.replay import token_adder

VOCABULARY = 16
STOP = 0
MAX_TURN = 4
MAX_OBSERVATION = 5
MAX_LENGTH = 40
MODEL = config_lib.TransformerConfig(
  vocabulary_size=VOCABULARY,
  num_layers=1,
  model_size=8,
  mlp_size=8,
  num_heads=2,
  num_kv_heads=1,
  head_size=4,
  init_scale=0.5,
)


class Environment(dm_env.Environment):
  """Episodes of 1 to 3 turns, which depend on nothing but their number.

  Turn t of an episode earns t + 1. The third kind of episode is truncated.

  Attributes:
    heard: the policy's turns, of each episode a list.
    said: what it was told, of each episode a list.
  """

  def __init__(self, number=0, before_step=lambda environment: None):
    self.number = number
    self.episode = -1
    self.heard, self.said = [], []
    self._before_step = before_step
    self._left = 0

  def reset(self):
    self.episode += 1
    self._random = np.random.default_rng(self.episode)
    self._left = self.num_turns = 1 + self.episode % 3
    self.heard.append([])
    self.said.append([])
    return dm_env.restart(self._say(1))

  def step(self, action):
    if not self._left:
      return self.reset()
    self._before_step(self)
    self.heard[-1].append(turns.unpack(action))
    self._left -= 1
    reward = np.float32(len(self.heard[-1]))
    if self._left:
      return dm_env.transition(reward, self._say(0))
    if self.num_turns == 3:
      return dm_env.truncation(reward, self._say(1))
    return dm_env.termination(reward, turns.pack([], MAX_OBSERVATION))

  def _say(self, least):
    size = int(self._random.integers(least, MAX_OBSERVATION + 1))
    tokens = self._random.integers(1, VOCABULARY, size).tolist()
    self.said[-1].append(tokens)
    return turns.pack(tokens, MAX_OBSERVATION)

  def observation_spec(self):
    return turns.observation_spec(MAX_OBSERVATION, VOCABULARY)

  def action_spec(self):
    return turns.action_spec(MAX_TURN, VOCABULARY)


class Variables(core.VariableSource):
  """Serves a version's own params."""

  def __init__(self):
    self.newest = 1

  def get_variables(self, min_version=0, timeout_s=0.0):
    if self.newest < min_version:
      return None
    params = params_lib.init(MODEL, jax.random.PRNGKey(self.newest))
    return types.Variables(
      self.newest, jax.tree_util.tree_map(np.array, params)
    )


def make_engine(num_slots, stop_tokens=(STOP,)):
  return engine_lib.Engine(
    MODEL,
    num_slots=num_slots,
    max_length=MAX_LENGTH,
    dtype='float32',
    stop_tokens=stop_tokens,
  )


class Rig:
  """A loop over N scripted environments, and everything around it.

  Attributes:
    environments: those in use, by number.
    replaced: those that failed.
  """

  def __init__(
    self,
    engine,
    *,
    mode='synchronous',
    permits=None,
    before_step=lambda environment: None,
    item_transitions=1,
    **config,
  ):
    num = engine.num_slots
    self.environments, self.replaced = {}, []
    self._lock = threading.Lock()
    factories = [
      lambda i=i: self._make_environment(i, before_step) for i in range(num)
    ]
    if mode == 'asynchronous':
      self.environment = vector.AsynchronousVectorEnvironment(
        factories, timeout_s=30.0
      )
    else:
      self.environment = vector.SynchronousVectorEnvironment(factories)
    self.writer = test_utils.ListWriter()
    self.adder = token_adder.TokenAdder(
      writer=self.writer, item_transitions=item_transitions, item_age_s=1e9
    )
    self.variables = Variables()
    self.permits = permits
    self.engine = engine
    self.loop = turn_loop.TurnLoop(
      environment=self.environment,
      engine=engine,
      adder=self.adder,
      variables=self.variables,
      variable_update_period_s=0.0,
      permits=permits or permit_line.OwnPermits(),
      config=turn_loop.TurnConfig(
        max_turn_tokens=MAX_TURN,
        token_dtype=np.dtype(np.uint8),
        **{'seed': 3, 'actor_id': 7} | config,
      ),
    )
    assert self.loop.wait_for_variables(1.0)

  def _make_environment(self, number, before_step):
    with self._lock:
      environment = Environment(number, before_step)
      old = self.environments.get(number)
      if old is not None:
        self.replaced.append(old)
        # As those of `tools.episodes` go on counting.
        environment.episode = old.episode
      self.environments[number] = environment
      return environment

  @property
  def items(self):
    return self.writer.items

  def run(self, condition, max_steps=3000):
    """Steps until `condition` holds."""
    for _ in range(max_steps):
      if condition():
        return
      self.loop.step(0.01)
    raise AssertionError('the condition does not come true')

  def step(self, count):
    for _ in range(count):
      self.loop.step(0.0)

  def close(self):
    self.environment.close()
    self.loop.close()


def columns(**kwargs):
  """Specs of the items."""
  environment_spec = specs.make_environment_spec(Environment())
  token = dm_specs.DiscreteArray(VOCABULARY)
  return specs.trajectories_spec(
    environment_spec._replace(
      observation=specs.stored_action_spec(token), action=token
    ),
    has_turns=True,
    **kwargs,
  )
