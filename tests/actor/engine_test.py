"""What the engine samples and records, whoever else is in the batch."""

import jax
import numpy as np
import pytest

from tunix_reverb import types
from tunix_reverb.actor import engine as engine_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.networks.transformer import params as params_lib
from tunix_reverb.sharding import mesh as mesh_lib
from tunix_reverb.telemetry import compiles

_CONFIG = config_lib.TransformerConfig(
  vocabulary_size=16,
  num_layers=2,
  model_size=16,
  mlp_size=24,
  num_heads=4,
  num_kv_heads=2,
  head_size=4,
  # Far from uniform, so that a log-probability says something.
  init_scale=0.5,
)
_MAX_LENGTH = 64
_NUM_SLOTS = 5
_STOP = 0
_TEMPERATURE = 0.7
# How far the recorded log-probs may be from the learner's, nats: the mean and
# the largest distance. The params are such that logits reach far.
_TOLERANCES = {'float32': (2e-6, 2e-5), 'bfloat16': (0.05, 0.4)}


def _variables(version=1):
  params = params_lib.init(_CONFIG, jax.random.PRNGKey(version))
  return types.Variables(version, jax.tree_util.tree_map(np.array, params))


def _make(dtype='float32', **kwargs):
  return engine_lib.Engine(
    _CONFIG,
    num_slots=_NUM_SLOTS,
    max_length=_MAX_LENGTH,
    dtype=dtype,
    stop_tokens=(_STOP,),
    temperature=_TEMPERATURE,
    **kwargs,
  )


@pytest.fixture(scope='module')
def made():
  return _make()


@pytest.fixture
def engine(made):
  """Compiled once; with version 1, nothing under way."""
  for slot in range(_NUM_SLOTS):
    made.cancel(slot)
  made.set_variables(_variables())
  return made


class _Episode:
  """A script of what the policy reads, and what it has read and written.

  The first entry of `reads` is the prompt; a turn is of up to 6 tokens.
  """

  def __init__(self, seed, reads, slot=0):
    self.seed, self.slot = seed, slot
    self._reads = list(reads)
    self.tokens, self.log_probs, self.versions = [], [], []

  def start(self, engine):
    engine.start(self.slot, self.seed)
    self.feed(engine)

  def feed(self, engine):
    """Returns whether there was something left to read."""
    if not self._reads:
      return False
    read = self._reads.pop(0)
    engine.feed(self.slot, read, 6)
    self._add(read, [np.nan] * len(read), [0] * len(read))
    return True

  def take(self, turn):
    self._add(*(x.tolist() for x in turn[1:]))

  def _add(self, *columns):
    for to, values in zip(
      (self.tokens, self.log_probs, self.versions), columns
    ):
      to += values


def _run(engine, episodes, between=lambda step: None):
  """Plays all of them to their end."""
  by_slot = {episode.slot: episode for episode in episodes}
  for episode in episodes:
    episode.start(engine)
  step = 0
  while engine.has_work:
    between(step)
    step += 1
    for turn in engine.step():
      by_slot[turn.slot].take(turn)
      by_slot[turn.slot].feed(engine)
  return episodes


def _crowd():
  """Prompts of all lengths, one longer than a chunk; turns in between."""
  rng = np.random.default_rng(0)
  some = lambda length: rng.integers(1, 16, length).tolist()
  return [
    _Episode(11, [some(3), some(2), []], slot=0),
    _Episode(12, [some(37), some(1)], slot=1),
    _Episode(13, [some(1)], slot=2),
    _Episode(14, [some(16), some(17)], slot=3),
    _Episode(15, [some(5), [], some(4)], slot=4),
  ]


def _learner_log_probs(dtype, episodes, version=1):
  """Of the sharded transformer, all episodes packed into one row."""
  mesh = mesh_lib.make_mesh(jax.devices()[:4], data=1, sequence=2, tensor=2)
  model = model_lib.make_transformer(
    _CONFIG,
    mesh,
    config_lib.ComputeConfig(dtype=dtype),
    temperature=_TEMPERATURE,
  )
  apply = mesh_lib.shard_map(
    model.apply,
    mesh=mesh,
    in_specs=(model.param_specs, *[mesh_lib.token_spec()] * 4),
    out_specs=mesh_lib.position_spec(),
  )
  tokens = np.concatenate([e.tokens for e in episodes])
  lengths = [len(e.tokens) for e in episodes]
  pad = -tokens.size % 4
  row = lambda x: np.pad(np.asarray(x, np.int32), (0, pad))[None]
  outputs = jax.jit(apply)(
    _variables(version).params,
    row(tokens),
    row(np.roll(tokens, -1)),
    row(np.repeat(np.arange(1, len(lengths) + 1), lengths)),
    row(np.concatenate([np.arange(length) for length in lengths])),
  )
  log_prob = np.asarray(outputs.log_prob)[0, : tokens.size]
  # Of each token, given those before it; of no first one.
  return [
    np.concatenate([[np.nan], part[:-1]])
    for part in np.split(log_prob, np.cumsum(lengths)[:-1])
  ]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_recorded_log_probs_equal_the_learners(dtype, engine):
  if dtype != 'float32':
    engine = _make(dtype)
    engine.set_variables(_variables())
  episodes = _run(engine, _crowd())
  differences = []
  for episode, expected in zip(episodes, _learner_log_probs(dtype, episodes)):
    ours = np.array(episode.log_probs, np.float32)
    written = ~np.isnan(ours)
    assert written.sum() >= 1
    differences.append(np.abs(ours - expected)[written])
  differences = np.concatenate(differences)
  mean, largest = _TOLERANCES[dtype]
  assert 0 < differences.mean() < mean
  assert differences.max() < largest


def test_an_episode_alone_equals_the_same_one_in_a_crowd(engine):
  crowd = _run(engine, _crowd())
  for episode, again in zip(crowd, _crowd()):
    again.slot = (episode.slot + 2) % _NUM_SLOTS
    _run(engine, [again])
    assert again.tokens == episode.tokens
    np.testing.assert_allclose(again.log_probs, episode.log_probs, atol=1e-5)


def test_equal_seeds_are_clones_and_others_are_not(engine):
  prompt = [3, 7, 1]
  # The third differs in the upper half of its seed.
  seeds = [5, 5, 5 + (1 << 40), 6, 7]
  episodes = _run(
    engine, [_Episode(s, [prompt, [2], [2]], i) for i, s in enumerate(seeds)]
  )
  tokens = [tuple(e.tokens) for e in episodes]
  assert tokens[0] == tokens[1]
  assert len(set(tokens)) == 4


def test_samples_follow_the_recorded_distribution(engine):
  """The first token's frequencies, over many seeds."""
  counts, probs = np.zeros(16), np.zeros(16)
  for seed in range(0, 400, _NUM_SLOTS):
    for slot in range(_NUM_SLOTS):
      engine.start(slot, seed + slot)
      engine.feed(slot, [4, 9], 1)
    for turn in engine.step():
      counts[turn.tokens[0]] += 1
      probs[turn.tokens[0]] = np.exp(turn.log_probs[0])
  assert counts.sum() == 400
  assert probs.sum() > 0.9
  # Five standard deviations of a count.
  np.testing.assert_allclose(counts / 400, probs, atol=5 * 0.5 / 20)


def test_new_variables_are_taken_between_any_two_tokens(engine):
  def between(step):
    if step == 3:
      engine.set_variables(_variables(2))

  (episode,) = _run(engine, [_Episode(3, [[2, 5], [3]])], between)
  versions = [v for v in episode.versions if v]
  assert versions[:4] == [1, 1, 1, 2]
  assert set(versions) == {1, 2}
  # Those of the old version are as without the change, the others are not.
  engine.set_variables(_variables(1))
  (before,) = _run(engine, [_Episode(3, [[2, 5], [3]])])
  assert before.tokens[:5] == episode.tokens[:5]
  assert before.log_probs[2:5] == episode.log_probs[2:5]
  assert before.log_probs[5] != episode.log_probs[5]


def test_a_step_runs_the_programs_of_those_that_have_work(engine, monkeypatch):
  ran = []

  def recorded(shape, program):
    return lambda *args: ran.append(shape) or program(*args)

  monkeypatch.setattr(
    engine,
    '_programs',
    {k: recorded(k, program) for k, program in engine._programs.items()},
  )
  for slot in range(_NUM_SLOTS):
    engine.start(slot, slot)
    engine.feed(slot, [3, 4], 1)
  assert len(engine.step()) == _NUM_SLOTS
  assert ran == [(_NUM_SLOTS, 16)]
  assert not engine.has_work and engine.step() == []
  # All are parked but one, which has a long result to read.
  ran.clear()
  engine.feed(2, [5] * 17, 2)
  while engine.has_work:
    engine.step()
  assert ran == [(1, 16), (1, 16), (1, 1)]


def test_nothing_is_compiled_after_the_first_episode_began(engine):
  counter = compiles.CompileCounter()
  counter.mark_warm()
  _run(engine, _crowd())
  engine.set_variables(_variables(2))
  _run(engine, _crowd()[1:3])
  assert counter.recompiles == 0


def test_turns_end_at_a_stop_token_or_at_their_limits(engine):
  endings = set()
  for seed in range(30):
    engine.start(0, seed)
    engine.feed(0, [3], 4)
    turns = []
    while engine.has_work:
      turns += engine.step()
    (turn,) = turns
    assert _STOP not in turn.tokens[:-1]
    assert turn.tokens.size == 4 or turn.tokens[-1] == _STOP
    assert turn.tokens.dtype == turn.policy_versions.dtype == np.int32
    assert turn.log_probs.dtype == np.float32
    endings.add((turn.tokens.size, bool(turn.tokens[-1] == _STOP)))
  assert (4, False) in endings and any(stopped for _, stopped in endings)
  # The end of the episode's room.
  engine.start(0, 1)
  engine.feed(0, [3] * (_MAX_LENGTH - 2), 10)
  while engine.has_work:
    turns = engine.step()
  assert turns[0].tokens.size <= 2
  engine.start(0, 1)
  engine.feed(0, [3] * (_MAX_LENGTH - 1), 10)
  while engine.has_work:
    turns = engine.step()
  assert turns[0].tokens.size == 1
  assert engine.length_left(0) == 0


def test_greedy_takes_the_likeliest(engine):
  greedy = _make(greedy=True)
  greedy.set_variables(_variables())
  episodes = [_Episode(s, [[3, 7], [2]], s) for s in range(3)]
  tokens = [e.tokens for e in _run(greedy, episodes)]
  assert tokens[0] == tokens[1] == tokens[2]
  sampled = _run(engine, [_Episode(s, [[3, 7], [2]], s) for s in range(3)])
  first = lambda episode: episode.log_probs[2]
  assert first(episodes[0]) >= max(first(e) for e in sampled)


def test_misuse_is_told(engine):
  with pytest.raises(ValueError, match=r'slot \(0\) must have an episode'):
    engine.feed(0, [1], 1)
  engine.start(0, 1)
  with pytest.raises(ValueError, match='must be a prompt'):
    engine.feed(0, [], 1)
  with pytest.raises(ValueError, match=r'\(64\) must leave room for a turn'):
    engine.feed(0, [1] * _MAX_LENGTH, 1)
  with pytest.raises(ValueError, match='max_new_tokens is 0'):
    engine.feed(0, [1], 0)
  engine.feed(0, [1], 3)
  with pytest.raises(ValueError, match='must not be writing'):
    engine.feed(0, [1], 3)
