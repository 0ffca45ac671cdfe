"""Names of topologies: cores or chips, shapes, and what is larger."""

import pytest

from tunix_reverb import errors
from tunix_reverb.sharding import chips
from tunix_reverb.sharding import topologies


@pytest.mark.parametrize(
  'name,chip,num_chips,shape',
  [
    ('v5p-256', 'v5p', 128, (4, 4, 8)),  # Counted in cores.
    ('v5e-256', 'v5e', 256, (16, 16)),
    ('v5litepod-16', 'v5e', 16, (4, 4)),
    ('v6e-8', 'v6e', 8, (2, 4)),
    ('v5p:4x4x12', 'v5p', 192, (4, 4, 12)),
    ('h200-8', 'h200', 8, ()),
  ],
)
def test_names_are_those_by_which_one_orders(name, chip, num_chips, shape):
  topology = topologies.parse(name)
  assert topology.chip is chips.CHIPS[chip]
  assert (topology.num_chips, topology.shape) == (num_chips, shape)


def test_a_cpu_has_no_figures():
  topology = topologies.parse('cpu-8')
  assert topology.chip is None
  assert topology.num_chips == 8
  assert not list(topologies.larger(topology))


def test_the_compiler_knows_a_tpu_by_its_shape():
  assert topologies.parse('v5p-256').compiler_name == 'v5p:4x4x8'


@pytest.mark.parametrize(
  'name,message',
  [
    ('v9-256', r"topology \('v9-256'\) must be a kind of chip \(v5e, v5p,"),
    ('v5e', r"topology \('v5e'\) must be a kind of chip .* such as v5p-256"),
    ('v5e-48', r'topology \(v5e-48\) must be one of v5e-1, v5e-4, .*v5e-256'),
    ('v5p-257', r'topology \(v5p-257\) must be one of v5p-8, v5p-16'),
    ('h100-16', r'topology \(h100-16\) must be one of h100-1, .*h100-8,'),
    ('v5e:4x4x4', r'must have a shape of up to 16x16'),
    ('v5e:4x32', r'must have a shape of up to 16x16'),
    ('cpu:2x2', r'must give a number: only TPUs have shapes'),
    ('cpu-0', r'must have at least 1 device'),
  ],
)
def test_what_there_is_not_is_refused_with_what_there_is(name, message):
  with pytest.raises(errors.UserError, match=message):
    topologies.parse(name)


def test_larger_ones_come_by_size_and_then_by_memory():
  names = [t.name for t in topologies.larger(topologies.parse('v5e-128'))]
  assert names[:3] == ['v5e-256', 'v6e-1', 'v6e-4']
  assert names[-1] == 'v5p-12288'
  assert all(topologies.parse(name).name == name for name in names)
