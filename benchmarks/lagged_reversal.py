"""The reversal task, learnt from params of a fixed number of updates ago.

A tiny transformer from scratch reads 4 symbols of 8 and writes them in reverse,
then the end token; each of these five tokens that is right earns a fifth as it
is written. Advantages are those of a critic with a trunk of its own. Every
update takes 256 episodes, eight of each prompt, sampled by the params of `lag`
updates before: the staleness of asynchronous actors, but exact and without
them. Packer, losses and update are the product's, and the actor's forward pass
samples, all turns of all episodes in one program.

Before each of its tokens the policy reads a marker that says which one it is
to write: an episode is five turns of one token, and the prompt ends with the
first marker. Without markers no setting that was tried learnt the task in 150
updates, also without a lag.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses
from typing import Any

from dm_env import specs as dm_specs
import jax
import jax.numpy as jnp
import numpy as np

from tunix_reverb import specs
from tunix_reverb import types
from tunix_reverb.batching import buckets
from tunix_reverb.batching import packer as packer_lib
from tunix_reverb.learner import objectives
from tunix_reverb.learner import optimiser as optimiser_lib
from tunix_reverb.learner import update as update_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import decoding
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.networks.transformer import presets
from tunix_reverb.ops import policy_loss
from tunix_reverb.sharding import mesh as mesh_lib

END, FIRST_SYMBOL = 0, 1
NUM_SYMBOLS = 8
FIRST_MARKER = FIRST_SYMBOL + NUM_SYMBOLS
VOCABULARY_SIZE = 16
PROMPT_LENGTH = 5  # Four symbols and the first marker.
ANSWER_LENGTH = 5  # Four symbols and the end.
# After the prompt, tokens of the policy and markers take turns.
LENGTH = PROMPT_LENGTH + 2 * ANSWER_LENGTH - 1
EPISODES = 256
EPISODES_PER_PROMPT = 8
LEARNING_RATE = 3e-3  # Adam's, constant.
MAX_UPDATES = 150
HIT = 0.95
WINDOW = 10  # Updates over which exact matches are averaged.
MODEL = dataclasses.replace(
  presets.get('tiny'),
  vocabulary_size=VOCABULARY_SIZE,
  num_heads=8,
  num_kv_heads=8,
  rope_theta=30.0,
  qk_norm=True,
  tied_embeddings=True,
  value_trunk=True,
)
_TRAJECTORIES_PER_ROW = 4
_BEHAVIOUR_KL_COST = 0.006


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What one run is made of.

  Attributes:
    kind: of the loss.
    lag: updates between the params that sample and those that are updated.
    behaviour_kl_cost: of the loss.
    seed: of everything.
  """

  kind: policy_loss.Kind
  lag: int = 16
  behaviour_kl_cost: float = 0.0
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run went.

  Attributes:
    hit: the first update at which the mean exact match of the last ten is at
      least 95%, counted from 1; None if there was none.
    exact: share of the episodes of each update whose answer is right.
    metrics: of the last update.
  """

  hit: int | None
  exact: list[float]
  metrics: dict[str, float]

  @property
  def last(self) -> float:
    """The mean exact match at the end."""
    return float(np.mean(self.exact[-WINDOW:]))


def runs() -> dict[str, tuple[Run, bool | None]]:
  """By name, what is run with seed 0, and whether it is to hit."""
  corrected = {
    kind: (Run(kind=kind, behaviour_kl_cost=_BEHAVIOUR_KL_COST), True)
    for kind in ('vtrace', 'tis', 'ppo')
  }
  return {
    'uncorrected_lag0': (Run(kind='uncorrected', lag=0), True),
    'uncorrected': (Run(kind='uncorrected'), False),
    # Half of the correction: the pull without the ratios. Nothing is asked of
    # it.
    'pull_alone': (
      Run(kind='uncorrected', behaviour_kl_cost=_BEHAVIOUR_KL_COST),
      None,
    ),
    **corrected,
  }


def run(
  spec: Run, report: Callable[[int, float, dict[str, float]], None]
) -> Result:
  """Learns until it hits, or for `MAX_UPDATES`.

  Args:
    spec: what to run.
    report: called after each update with (its number, the mean exact match of
      the last ten, its metrics).
  """
  learner = _Learner(spec)
  rng = np.random.default_rng(spec.seed)
  exact: list[float] = []
  for step in range(1, MAX_UPDATES + 1):
    item = learner.act(rng)
    exact.append(_is_exact(item))
    metrics = learner.update(item)
    mean = float(np.mean(exact[-WINDOW:]))
    report(step, mean, metrics)
    if step >= WINDOW and mean >= HIT:
      return Result(step, exact, metrics)
  return Result(None, exact, metrics)


class _Learner:
  """Params, their past, and the programs."""

  def __init__(self, spec: Run):
    self._spec = spec
    self._mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
    compute = config_lib.ComputeConfig(dtype='float32', remat='none')
    model = model_lib.make_transformer(MODEL, self._mesh, compute)
    self._objective = objectives.token_objective(
      model,
      objectives.LossConfig(
        discount_factor=1.0, behaviour_kl_cost=spec.behaviour_kl_cost
      ),
      policy_loss=policy_loss.PolicyLoss(kind=spec.kind),
    )
    optimiser = optimiser_lib.make_optimiser(
      learning_rate=LEARNING_RATE,
      learning_rate_end=1.0,
      decay_steps=1,
      max_grad_norm=1.0,
    )
    self._state = update_lib.init_state(
      self._objective, optimiser, self._mesh, key=jax.random.PRNGKey(spec.seed)
    )
    self._update = update_lib.make_update(
      self._objective,
      optimiser,
      self._mesh,
    )
    self._sample = _make_sample(MODEL)
    self._key = jax.random.PRNGKey(1000 + spec.seed)
    # (version, params): the oldest acts.
    self._past = collections.deque(maxlen=spec.lag + 1)
    self._keep_params(0)
    self._packer = _make_packer()

  def act(self, rng: np.random.Generator) -> types.Trajectories:
    """One item of all the episodes of an update."""
    prompts = FIRST_SYMBOL + rng.integers(
      0, NUM_SYMBOLS, (EPISODES // EPISODES_PER_PROMPT, PROMPT_LENGTH)
    )
    prompts[:, -1] = FIRST_MARKER
    prompts = np.repeat(prompts, EPISODES_PER_PROMPT, axis=0).astype(np.int32)
    version, params = self._past[0]
    self._key, key = jax.random.split(self._key)
    answers, log_probs = jax.device_get(self._sample(params, prompts, key))
    return _trajectories(prompts, answers, log_probs, version)

  def update(self, item: types.Trajectories) -> dict[str, float]:
    """One learner step on the item; returns its metrics."""
    self._packer.add(item)
    packed = self._packer.pop()
    assert packed is not None and packed.segments.length.size == EPISODES
    batch = mesh_lib.place_batch(
      packed.batch, self._mesh, self._objective.batch_spec
    )
    self._state, metrics = self._update(self._state, batch)
    self._keep_params(int(self._state.learner_step))
    return {name: float(x) for name, x in jax.device_get(metrics).items()}

  def _keep_params(self, version: int) -> None:
    # Copies: the update donates its state.
    params = jax.tree_util.tree_map(jnp.copy, self._state.params)
    self._past.append((version, params))


def _make_packer() -> packer_lib.Packer:
  """One that makes a batch of the episodes of an update."""
  token = dm_specs.BoundedArray((), np.uint8, 0, VOCABULARY_SIZE - 1)
  columns = specs.trajectories_spec(
    specs.EnvironmentSpec(
      token,
      token,
      dm_specs.Array((), np.float32),
      dm_specs.BoundedArray((), np.float32, 0, 1),
    ),
    has_turns=True,
  )
  length = LENGTH * _TRAJECTORIES_PER_ROW
  rows = EPISODES // _TRAJECTORIES_PER_ROW
  return packer_lib.Packer(
    buckets=(buckets.Bucket(length, rows),),
    columns=columns,
    window=1.0,
    max_trajectories=EPISODES,
  )


def _make_sample(model: config_lib.TransformerConfig) -> Any:
  """Jitted (params, prompts [N, 5], key) -> answers and log-probs [N, 5]."""

  def sample(params, prompts, key):
    num = prompts.shape[0]
    params = decoding.prepare(params, 'float32')
    full = lambda value: jnp.full(num, value, jnp.int32)

    def write(cache, tokens, start, key):
      reading = decoding.Reading(
        jnp.arange(num, dtype=jnp.int32),
        tokens,
        full(start),
        full(tokens.shape[1]),
      )
      log_probs, cache = decoding.read(model, params, cache, reading)
      token = jax.random.categorical(key, log_probs).astype(jnp.int32)
      log_prob = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
      return cache, token, log_prob

    def body(carry, x):
      cache, token = carry
      start, marker, key = x
      tokens = jnp.stack([token, full(marker)], axis=1)
      cache, token, log_prob = write(cache, tokens, start, key)
      return (cache, token), (token, log_prob)

    cache = decoding.empty_cache(
      model,
      num_slots=num,
      length=LENGTH,
      dtype='float32',
    )
    first, *keys = jax.random.split(key, ANSWER_LENGTH)
    cache, token, log_prob = write(cache, prompts, 0, first)
    turns = jnp.arange(ANSWER_LENGTH - 1, dtype=jnp.int32)
    _, rest = jax.lax.scan(
      body,
      (cache, token),
      (PROMPT_LENGTH + 2 * turns, FIRST_MARKER + 1 + turns, jnp.stack(keys)),
    )
    with_first = lambda one, more: jnp.concatenate([one[:, None], more.T], 1)
    return with_first(token, rest[0]), with_first(log_prob, rest[1])

  return jax.jit(sample)


def _trajectories(
  prompts: np.ndarray,
  answers: np.ndarray,
  log_probs: np.ndarray,
  version: int,
) -> types.Trajectories:
  """One item of N episodes, each as long as its answer goes on.

  Args:
    prompts: i32 [N, 5].
    answers: i32 [N, 5], whatever was sampled, also after an end.
    log_probs: f32 [N, 5], of the answers.
    version: that sampled.
  """
  num = prompts.shape[0]
  ends = np.cumsum(answers == END, axis=1)
  is_written = (ends == 0) | ((ends == 1) & (answers == END))
  right = np.concatenate(
    [prompts[:, -2::-1], np.full((num, 1), END, np.int32)], axis=1
  )
  # A fifth of the reward for each token that is right, when it is written.
  rewards = (is_written & (answers == right)) / np.float32(ANSWER_LENGTH)
  policy = slice(PROMPT_LENGTH, None, 2)
  tokens = np.zeros((num, LENGTH), np.uint8)
  tokens[:, :PROMPT_LENGTH] = prompts
  tokens[:, PROMPT_LENGTH - 1 :: 2] = FIRST_MARKER + np.arange(ANSWER_LENGTH)
  tokens[:, policy] = answers
  is_token = np.ones(tokens.shape, bool)
  is_token[:, policy] = is_written
  is_token[:, PROMPT_LENGTH + 1 :: 2] = is_written[:, 1:]
  is_last = np.zeros_like(is_token)
  is_last[np.arange(num), is_token.sum(axis=1) - 1] = True
  is_policy = np.zeros_like(is_token)
  is_policy[:, policy] = True
  behaviour = np.zeros(tokens.shape, np.float32)
  behaviour[:, policy] = log_probs
  reward = np.zeros(tokens.shape, np.float32)
  reward[:, policy] = rewards
  # Of the transition that writes a token.
  written = lambda x: x[:, 1:][is_token[:, 1:]]
  size = int(is_token[:, 1:].sum())
  return types.Trajectories(
    observation=tokens[is_token],
    action=written(tokens),
    reward=written(reward),
    discount=(~written(is_last)).astype(np.float32),
    behaviour_log_prob=written(behaviour),
    policy_version=np.full(size, version, np.int32),
    loss_mask=written(is_policy),
    core_state=(),
    lengths=is_token[:, 1:].sum(axis=1).astype(np.int32),
    created_at_s=np.zeros(num),
    actor_id=np.zeros(num, np.int32),
    episode_id=np.arange(num, dtype=np.int64),
    truncated=np.zeros(num, np.bool_),
    permit_id=np.arange(num, dtype=np.int64),
    turn_id=written(is_policy).astype(np.int32),
  )


def _is_exact(item: types.Trajectories) -> float:
  """The share of episodes whose whole answer is right."""
  starts = np.cumsum(item.lengths) - item.lengths
  returns = np.add.reduceat(item.reward, starts)
  return float(np.mean(returns > 1 - 1e-6))
