"""Suggested meshes divide every preset; what cannot be is refused."""

import pytest

from tunix_reverb import errors
from tunix_reverb.agents.transformer.plan import estimate as estimate_lib
from tunix_reverb.agents.transformer.plan import meshes
from tunix_reverb.agents.transformer.plan import settings as settings_lib
from tunix_reverb.networks.transformer import config as config_lib
from tunix_reverb.networks.transformer import presets
from tunix_reverb.sharding import topologies

_GIB = 2**30


def _request(model, topology, mesh=meshes.OPEN, **changes):
  values = {'row_length': 8192, 'num_rows': 0, 'num_micro_batches': 1}
  return meshes.Request(
    model_name=model,
    model=presets.get(model),
    compute=config_lib.ComputeConfig(),
    topology=topologies.parse(topology),
    mesh=settings_lib.MeshSizes(*mesh),
    **(values | changes),
  )


def _suggest(request, limit_gib=None):
  chip = request.topology.chip
  limit = limit_gib * _GIB if limit_gib else chip.memory_bytes
  return meshes.suggest(request, limit)


@pytest.mark.parametrize('model', presets.PRESETS)
@pytest.mark.parametrize('topology', ['v5e-16', 'v5p-256', 'h200-8'])
def test_there_is_a_mesh_for_every_preset(model, topology):
  settings = _suggest(_request(model, topology))
  assert settings.mesh.num_devices == settings.topology.num_chips
  assert not settings.problem()
  assert settings.num_rows == settings.mesh.num_batch_shards


def test_the_suggested_one_is_the_fastest_of_those_that_fit():
  request = _request('llama3-70b', 'v5e-256')
  limit = request.topology.chip.memory_bytes
  best, *others = meshes.ranked(request, limit)
  assert len(others) > 100
  of = lambda x: estimate_lib.estimate(x)
  per_token = lambda x: of(x).step_s / x.num_tokens
  assert of(best).total_bytes < limit
  faster = [x for x in others if per_token(x) < 0.97 * per_token(best)]
  assert faster
  assert all(of(x).total_bytes > 0.85 * limit for x in faster)


def test_where_none_fits_the_one_that_needs_the_least_is_planned():
  request = _request('llama3-70b', 'v5e-16')
  settings = _suggest(request)
  least = estimate_lib.estimate(settings).total_bytes
  assert least > request.topology.chip.memory_bytes
  assert least == min(
    estimate_lib.estimate(x).total_bytes for x in meshes.ranked(request, 0)
  )


def test_plain_replicas_are_enough_for_a_small_model():
  settings = _suggest(_request('10m', 'v5e-8', row_length=1024))
  assert settings.mesh.sequence == settings.mesh.tensor == 1


def test_given_axes_and_rows_are_kept():
  settings = _suggest(
    _request('llama3-70b', 'v5p-256', mesh=(0, 0, 0, 8), num_rows=16)
  )
  assert settings.mesh.tensor == 8
  assert settings.num_rows == 16
  assert settings.num_rows % settings.mesh.num_batch_shards == 0


def test_micro_batches_get_rows_of_their_own():
  settings = _suggest(_request('llama3-8b', 'v5e-16', num_micro_batches=3))
  assert settings.num_rows == 3 * settings.mesh.num_batch_shards
  assert settings.micro_batch_rows == 1


@pytest.mark.parametrize(
  'changes,message',
  [
    (
      {'mesh': (1, 3, 1, 1)},
      r'mesh \(data 1 x fsdp 3 x sequence 1 x tensor 1\) must multiply to the '
      r'chips of v5e-16 \(16\)',
    ),
    ({'mesh': (1, 1, 1, 16)}, r'num_kv_heads \(8\) .* of tensor \(16\)'),
    ({'mesh': (16, 1, 1, 1), 'num_rows': 24}, r'rows \(24\) must be a mult'),
    ({'mesh': (0, 0, 8, 0), 'row_length': 100}, r'llama3-8b on v5e-16: '),
  ],
)
def test_a_mesh_that_cannot_be_is_refused_with_the_reason(changes, message):
  with pytest.raises(errors.UserError, match=message):
    _suggest(_request('llama3-8b', 'v5e-16', **changes))
