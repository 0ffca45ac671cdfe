"""Environments by name: every scheme, every mistake."""

import sys
import unittest
import warnings

import dm_env
from dm_env import test_utils
import numpy as np
import pytest

pytest.importorskip('fakes', reason='gymnasium is missing')

from tunix_reverb import errors
from tunix_reverb import specs as specs_lib
from tunix_reverb.environments import factory
from tunix_reverb.environments import vector

_LIBRARIES = {
  'bsuite': 'bsuite',
  'gym': 'gymnasium',
  'atari': 'ale_py',
  'dm_control': 'dm_control',
  'envpool': 'envpool',
}


def _make(name, **kwargs):
  library = _LIBRARIES.get(name.partition(':')[0])
  if library:
    pytest.importorskip(library, reason=f'{library} is not installed')
  return factory.make(name, **{'seed': 1, **kwargs})


class _NamedTest(test_utils.EnvironmentTestMixin):
  name = ''

  def make_object_under_test(self):
    return _make(self.name)


class BsuiteCatchTest(_NamedTest, unittest.TestCase):
  name = 'bsuite:catch/0'


class BsuiteMemoryTest(_NamedTest, unittest.TestCase):
  name = 'bsuite:memory_len/0'


class DmControlTest(_NamedTest, unittest.TestCase):
  name = 'dm_control:cartpole/balance'


class AtariTest(_NamedTest, unittest.TestCase):
  name = 'atari:Pong'


class EnvpoolTest(_NamedTest, unittest.TestCase):
  name = 'envpool:CartPole-v1'


class OwnTest(_NamedTest, unittest.TestCase):
  name = 'fakes:make_counter'


def _observations(name, seed, num_steps=12):
  environment = _make(name, seed=seed)
  action = environment.action_spec().generate_value()
  timesteps = [environment.reset()]
  timesteps += [environment.step(action) for _ in range(num_steps)]
  environment.close()
  leaves = []
  for timestep in timesteps:
    observation = timestep.observation
    parts = observation if isinstance(observation, dict) else {'': observation}
    leaves += [np.ravel(parts[k]) for k in sorted(parts)]
  return np.concatenate(leaves)


@pytest.mark.parametrize(
  'name',
  [
    'catch',
    'bsuite:catch/0',
    'gym:CartPole-v1',
    'dm_control:cartpole/balance',
    'envpool:CartPole-v1',
    'fakes:make_counter',
  ],
)
def test_the_seed_decides(name):
  first = _observations(name, 1)
  np.testing.assert_array_equal(first, _observations(name, 1))
  assert any(
    not np.array_equal(first, _observations(name, seed)) for seed in (2, 3, 4)
  )


def test_every_bsuite_experiment_takes_a_seed():
  sweep = pytest.importorskip('bsuite.sweep', reason='bsuite is missing')
  names = {n.partition('/')[0] for n in sweep.SETTINGS}
  for name in sorted(n for n in names if not n.startswith('mnist')):
    timestep = _make(f'bsuite:{name}/0').reset()
    assert timestep.first()


def test_dm_control_ends_by_truncation_and_observes_plain_float32_dicts():
  environment = _make('dm_control:cartpole/balance')
  timestep = environment.reset()
  assert type(timestep.observation) is dict
  assert {v.dtype for v in timestep.observation.values()} == {
    np.dtype(np.float32)
  }
  length = 0
  while not timestep.last():
    timestep = environment.step(np.zeros(1, np.float32))
    length += 1
  assert (length, timestep.discount) == (1000, 1.0)


def test_gym_time_limit_is_a_truncation():
  environment = _make('gym:Pendulum-v1')
  timestep, length = environment.reset(), 0
  while not timestep.last():
    timestep = environment.step(np.zeros(1, np.float32))
    length += 1
  assert (length, timestep.discount) == (200, 1.0)


def test_atari_preprocessing():
  environment = _make('atari:breakout')
  spec = environment.observation_spec()
  assert (spec.shape, spec.dtype) == ((84, 84, 4), np.uint8)
  first = environment.reset().observation
  for i in range(3):  # One frame fills the stack.
    np.testing.assert_array_equal(first[..., i], first[..., 3])
  second = environment.step(np.int32(0)).observation
  np.testing.assert_array_equal(second[..., :3], first[..., 1:])
  assert not np.shares_memory(first, second)


@pytest.mark.parametrize(
  ('name', 'probability'),
  [('atari:Pong', 0.0), ('atari:Pong-v4', 0.0), ('atari:Pong-v5', 0.25)],
)
def test_atari_versions_decide_on_sticky_actions(name, probability):
  emulator = _make(name)._environment._environment.unwrapped.ale
  assert emulator.getFloat('repeat_action_probability') == probability
  assert emulator.getInt('max_num_frames_per_episode') == 108_000


def test_a_users_own_is_made_canonical():
  spec = factory.environment_spec('fakes:make_counter')
  assert isinstance(spec, specs_lib.EnvironmentSpec)
  assert spec.observation.dtype == np.float32
  assert spec.reward.dtype == np.float32


def test_environments_of_a_vector_differ_in_seed_and_so_do_replacements():
  environment = factory.make_vector(
    'fakes:make_raising', num_environments=2, seed=5
  )
  seeds = set()
  for _ in range(8):
    ids, timestep = environment.recv(1.0)
    seeds |= set(timestep.observation[:, 1].tolist())
    environment.send(np.zeros(len(ids), np.int32), ids)
  assert environment.failures['error'] == 2
  assert len(seeds) == 4
  environment.close()


def test_modes():
  kwargs = {'num_environments': 2, 'seed': 0}
  environment = factory.make_vector('catch', mode='asynchronous', **kwargs)
  assert isinstance(environment, vector.AsynchronousVectorEnvironment)
  environment.close()
  with pytest.raises(errors.UserError, match='vectorised, asynchronous'):
    factory.make_vector('catch', mode='fast', **kwargs)
  with pytest.raises(errors.UserError, match="must be 'vectorised'"):
    factory.make_vector('envpool:CartPole-v1', mode='asynchronous', **kwargs)
  with pytest.raises(errors.UserError, match='must be >= 1'):
    factory.make_vector('catch', num_environments=0, seed=0)


_SCHEMES = r'catch, bsuite:<id>, gym:<id>, atari:<id>, dm_control:<id>, envpool'


@pytest.mark.parametrize(
  ('name', 'text'),
  [
    ('cath', _SCHEMES + r'.*did you mean catch'),
    ('gmy:CartPole-v1', _SCHEMES + r'.*did you mean gym'),
    ('CartPole-v1', _SCHEMES),
    ('no.such.module:make', _SCHEMES),
    ('not a module:make', _SCHEMES),
    ('gym:', 'must name one after the colon'),
    ('gym:CartPol-v1', 'such as CartPole-v1'),
    ('gym:Cart Pole', 'must be valid: Malformed'),
    ('gym:no_such_module:Env-v0', 'importable module'),
    ('bsuite:catch/99', 'bsuite id.*such as catch/9'),
    ('atari:Pongg', 'such as pong'),
    ('atari:Pong-v9', 'must be v4 .* or v5'),
    ('dm_control:cartpole/balanc', 'such as cartpole/balance'),
    ('envpool:CartPol-v1', 'such as CartPole-v1'),
    ('fakes:no_such_function', 'must name a callable of the module fakes'),
    ('fakes:make_nothing', 'must return a dm_env.Environment; .* a str'),
  ],
)
def test_mistakes_are_told_in_one_line(name, text):
  with pytest.raises(errors.UserError, match=text) as e:
    _make(name)
  assert '\n' not in str(e.value)


@pytest.mark.parametrize(('scheme', 'library'), sorted(_LIBRARIES.items()))
def test_a_missing_extra_is_named(scheme, library, monkeypatch):
  for module in [m for m in sys.modules if m.split('.')[0] == library]:
    monkeypatch.delitem(sys.modules, module)
  monkeypatch.setitem(sys.modules, library, None)  # Import raises.
  text = rf"pip install 'tunix_reverb\[{scheme}\]', or `make environments`"
  with pytest.raises(errors.MissingExtraError, match=text):
    factory.make(f'{scheme}:x', seed=0)


def test_an_error_inside_a_users_module_keeps_its_traceback(
  tmp_path, monkeypatch
):
  (tmp_path / 'half_broken.py').write_text('import no_such_dependency\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ModuleNotFoundError, match='no_such_dependency'):
    factory.make('half_broken:make', seed=0)


def test_making_gym_environments_warns_of_nothing():
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    for name in ('gym:CartPole-v0', 'gym:CartPole-v1'):
      _make(name).close()


def test_derived_seeds_do_not_collide():
  seeds = {
    factory.derived_seed(seed, i, generation)
    for seed in range(8)
    for i in range(32)
    for generation in range(2)
  }
  assert len(seeds) == 8 * 32 * 2
  assert max(seeds) < 2**31


def test_steps_are_dm_env_timesteps():
  assert isinstance(_make('catch').reset(), dm_env.TimeStep)
