"""The policy at a temperature is that of logits divided by it."""

import jax
import numpy as np
import oracle
import pytest

from tunix_reverb.networks.transformer import model as model_lib
from tunix_reverb.sharding import mesh as mesh_lib

_TEMPERATURE = 0.6


@pytest.mark.parametrize('tensor', [1, 2])
def test_log_probs_and_entropy_are_of_logits_divided_by_it(tensor):
  config = oracle.TINY
  params = oracle.random_params(config)
  batch = oracle.packed_batch(config, rows=2, length=8)
  mesh = mesh_lib.make_mesh(jax.devices()[:tensor], data=1, tensor=tensor)
  model = model_lib.make_transformer(
    config, mesh, oracle.F32, temperature=_TEMPERATURE
  )
  apply = mesh_lib.shard_map(
    model.apply,
    mesh=mesh,
    in_specs=(model.param_specs,) + (mesh_lib.token_spec(),) * 4,
    out_specs=mesh_lib.position_spec(),
  )
  placed = oracle.place(model, params, batch)
  actual = oracle.compile_fast(apply, placed[0], *placed[1])(
    placed[0], *placed[1]
  )
  cooled = params | {'head': params['head'] / np.float32(_TEMPERATURE)}
  log_prob, entropy, _ = oracle.outputs(config, cooled, *batch)
  # The value is not of the policy.
  _, _, value = oracle.outputs(config, params, *batch)
  is_real = batch[2] > 0
  for ours, theirs in zip(actual, (log_prob, entropy, value)):
    np.testing.assert_allclose(
      np.asarray(ours)[is_real], theirs[is_real], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize('temperature', [0.0, -1.0, float('nan')])
def test_refuses_no_temperature(temperature):
  mesh = mesh_lib.make_mesh(jax.devices()[:1], data=1)
  with pytest.raises(ValueError, match=r'temperature .* must be > 0'):
    model_lib.make_transformer(oracle.TINY, mesh, temperature=temperature)
