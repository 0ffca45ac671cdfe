"""The flags: frozen list, round trip, files, and one-line answers."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from launch import flags
from tunix_reverb import errors
from tunix_reverb.agents import config as config_lib
from tunix_reverb.agents import flat

# Renaming or removing one breaks users' scripts and saved configs: change
# this list only on purpose.
_FLAGS = """
agent environment seed watchdog_s
torso hidden_sizes core core_size
model compute_dtype remat importance_ratio
loss tis_cap ppo_clip_low ppo_clip_high ppo_dual_clip ppo_behaviour_cap
value_trunk
temperature max_turns max_turn_tokens group_size advantage
policy_url endpoint_host endpoint_port evaluate_sampled
num_actors environments_per_actor environment_mode environment_timeout_s
trajectory_length item_bytes item_age_s variable_update_period_s
replay_client replay_mode sampler priority_exponent max_table_items
min_table_items samples_per_insert samples_per_insert_tolerance num_servers
admission trajectories_per_update trajectories_in_flight permit_lease_s
replay_checkpoint_period_s replay_checkpoints_to_keep
max_policy_lag max_age_s sweep_period_s
bucket_lengths batch_positions packing_window prefetch_batches
data_axis fsdp_axis sequence_axis tensor_axis virtual_devices
num_learners
learning_rate learning_rate_end learning_rate_decay_steps max_grad_norm
discount_factor rho_bar c_bar vtrace_lambda baseline_cost entropy_cost
behaviour_kl_cost reward_clip reward_scale publish_period max_learner_steps
max_non_finite_updates num_micro_batches updates_per_batch
learner_checkpoint_period_s learner_checkpoints_to_keep
evaluation_episodes evaluation_period_s solved_return hold_s max_run_s
""".split()


@pytest.fixture(autouse=True)
def fresh_flags():
  """Leaves the process's flags as they were."""
  flags.define_config_flags()
  flags.define_role_flags()
  flags.FLAGS.unparse_flags()
  yield
  flags.FLAGS.unparse_flags()
  for name in [*flat.scalar_fields(), 'config', 'run_dir']:
    flags.FLAGS[name].unparse()


def _parse(*args):
  flags.parse(['program', *args])
  return flags.config_from_flags()


def test_the_list_of_config_flags_is_frozen():
  assert list(flat.scalar_fields()) == _FLAGS
  assert not [name for name in _FLAGS if name not in flags.FLAGS]


def test_no_flags_give_the_defaults():
  assert _parse() == config_lib.ExperimentConfig()


def test_every_field_round_trips_through_its_flag():
  values = flat.to_flat(config_lib.ExperimentConfig())
  args = [flags.format_flag(name, value) for name, value in values.items()]
  assert _parse(*args) == config_lib.ExperimentConfig()
  assert flags.given_flags() == values


def test_changed_values_arrive_with_their_types():
  config = _parse(
    '--seed=7',
    '--hidden_sizes=32,16',
    '--core=gru',
    '--solved_return=inf',
    '--learning_rate=1e-4',
    '--admission',
    '--replay_client=wire',
  )
  assert config.seed == 7
  assert config.replay.admission is True
  assert config.network.hidden_sizes == (32, 16)
  assert config.network.core == 'gru'
  assert config.learner.learning_rate == 1e-4


def test_given_flags_override_the_file(tmp_path):
  path = tmp_path / 'my.json'
  path.write_text(json.dumps({'seed': 3, 'num_actors': 5}))
  config = _parse(f'--config={path}', '--seed=4')
  assert (config.seed, config.actor.num_actors) == (4, 5)


def test_the_run_directory_supplies_the_config(tmp_path):
  config = flat.from_flat({'seed': 11, 'bucket_lengths': [50, 100]})
  (tmp_path / 'config.json').write_text(flat.dumps(config))
  assert _parse(f'--run_dir={tmp_path}') == config
  other = _parse(f'--run_dir={tmp_path}', '--num_actors=1')
  assert other == dataclasses.replace(
    config, actor=config_lib.ActorConfig(num_actors=1)
  )


@pytest.mark.parametrize(
  ('arg', 'words'),
  [
    ('--sed=1', ['--sed', 'did you mean', '--seed']),
    ('--seed=x', ['--seed', 'x', 'int']),
    ('--learning_rate=x', ['--learning_rate', 'x', 'float']),
    ('--torso=cnn', ['torso', 'cnn', 'mlp', 'impala', 'atari']),
    ('--hidden_sizes=64,b', ['hidden_sizes', '64,b', 'int']),
    ('--num_actors=0', ['num_actors', '0', '> 0']),
    ('--bucket_lengths=9', ['bucket_lengths', '9', 'trajectory_length']),
    ('--config=absent.json', ['absent.json', 'readable']),
    ('--admission=x', ['--admission', 'x', 'bool']),
    (
      '--admission --replay_client=wire --replay_mode=replay',
      ['replay_mode', 'replay', '--replay_mode=queue', '--noadmission'],
    ),
    (
      '--admission --replay_client=official',
      ['replay_client', 'official', '--replay_client=wire', '--noadmission'],
    ),
    (
      '--admission --replay_client=wire --max_policy_lag=0 '
      '--trajectories_per_update=41',
      ['trajectories_per_update', '41', '<= 40', 'batch_positions'],
    ),
    (
      '--admission --replay_client=wire --max_policy_lag=2 '
      '--trajectories_per_update=8 --trajectories_in_flight=25',
      ['trajectories_in_flight', '25', '(8)', '(24)'],
    ),
    (
      '--admission --replay_client=wire --trajectories_in_flight=30 '
      '--trajectories_per_update=8 --agent=transformer --group_size=4 '
      '--advantage=rloo',
      ['trajectories_in_flight', '30', 'multiple of group_size (4)'],
    ),
    ('stray', ['stray', '--name=value']),
  ],
)
def test_a_mistake_is_told_in_one_line(arg, words):
  with pytest.raises(errors.UserError) as e:
    _parse(*arg.split())
  message = str(e.value)
  assert '\n' not in message
  assert not [word for word in words if word not in message], message


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('{', ['JSON']),
    ('[]', ['object']),
    ('{"sead": 1}', ['sead']),
    ('{"seed": "x"}', ['seed', 'int']),
    ('{"admission": 1}', ['admission', '1', 'bool']),
  ],
)
def test_a_bad_file_is_named(tmp_path, text, words):
  path = tmp_path / 'bad.json'
  path.write_text(text)
  with pytest.raises(errors.UserError) as e:
    _parse(f'--config={path}')
  assert not [w for w in [str(path), *words] if w not in str(e.value)]


@pytest.mark.integration
@pytest.mark.parametrize('arg', ['--help', '--sed=1', '--torso=cnn'])
def test_the_binary_answers_within_two_seconds(arg, subprocess_env, tmp_path):
  start_s = time.monotonic()
  result = subprocess.run(
    [sys.executable, '-m', 'launch.local', arg],
    env=subprocess_env,
    cwd=tmp_path,
    text=True,
    capture_output=True,
    timeout=30,
  )
  assert time.monotonic() - start_s < 2.0
  if arg == '--help':
    assert result.returncode == 0
    missing = [
      n for n in [*_FLAGS, 'resume'] if f'--{n}\n' not in result.stdout
    ]
    assert not missing
  else:
    assert result.returncode == 2
    assert result.stdout == ''
    assert result.stderr.startswith('error: ')
    assert result.stderr.count('\n') == 1
