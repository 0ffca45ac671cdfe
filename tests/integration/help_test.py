"""--help of every binary is quick, and lists exactly these flags of its own."""

import pathlib
import re
import time

import pytest

import launch
from tunix_reverb.agents import flat

pytestmark = pytest.mark.integration

_ROLE = {'config', 'run_dir', 'replay_servers', 'supervised'}
# A flag that is added, renamed or removed is a change that users see.
_OWN_FLAGS = {
  'actor': _ROLE | {'actor_id'},
  'check_environment': {'environment', 'model', 'num_steps', 'seed'},
  'endpoint': _ROLE | {'actor_id'},
  'evaluator': _ROLE | {'checkpoint'},
  'export_model': {'config', 'run_dir', 'checkpoint', 'output', 'dtype'},
  'learner': _ROLE | {'learner_index', 'coordinator_address'},
  'local': _ROLE
  | {'resume', 'replay_restore'}
  | {
    'replay_server_python',
    'learner_python',
    'actor_python',
    'evaluator_python',
  },
  'plan': {
    'model',
    'topology',
    'data_axis',
    'fsdp_axis',
    'sequence_axis',
    'tensor_axis',
    'row_length',
    'rows',
    'micro_batches',
    'dtype',
    'remat',
    'compiler',
  },
  'transcripts': {'run_dir', 'last', 'policy_version', 'tokens'},
  'replay_server': _ROLE
  | {'server_index', 'port', 'columns_file', 'replay_restore'},
}
# Those that do not take the config of a run.
_WITHOUT_CONFIG = ('check_environment', 'plan', 'transcripts')


def test_every_binary_is_listed():
  binaries = {
    path.stem
    for path in pathlib.Path(launch.__path__[0]).glob('*.py')
    if "__name__ == '__main__'" in path.read_text(encoding='utf-8')
  }
  assert binaries == _OWN_FLAGS.keys()


@pytest.mark.parametrize('name', _OWN_FLAGS)
def test_help_is_quick_and_complete(start, name):
  start_s = time.monotonic()
  process = start(name, '--help')
  assert process.wait(20) == 0, process.err
  assert time.monotonic() - start_s < 2.0
  assert process.err == ''
  assert process.out.startswith(f'python -m launch.{name}\n')
  listed = re.findall(r'^  --(\w+)$', process.out, re.MULTILINE)
  config = [] if name in _WITHOUT_CONFIG else list(flat.scalar_fields())
  assert sorted(listed) == sorted([*_OWN_FLAGS[name], *config])


@pytest.mark.parametrize('name', _OWN_FLAGS)
def test_a_bad_flag_is_one_quick_line(refused, name):
  start_s = time.monotonic()
  others = {'plan': ('mode', 'model'), 'transcripts': ('las', 'last')}
  flag, meant = others.get(name, ('sed', 'seed'))
  line = refused(name, f'--{flag}=1')
  assert time.monotonic() - start_s < 2.0
  assert line == f'error: unknown flag --{flag}; did you mean --{meant}?'


@pytest.mark.parametrize(
  ('flag', 'words'),
  [
    ('--num_actors=two', 'must be of type int'),
    ('--num_actors=0', 'num_actors (0) must be > 0'),
    ('--replay_mode=stack', 'queue'),
    ('--config=absent.json', 'must be a readable file'),
    ('positional', 'unexpected argument'),
  ],
)
def test_a_bad_value_is_one_quick_line(refused, flag, words):
  start_s = time.monotonic()
  assert words in refused('local', flag)
  assert time.monotonic() - start_s < 2.0
