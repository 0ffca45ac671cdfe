"""Costs read from HLO, written by hand and made by this JAX."""

import jax
import jax.numpy as jnp
import pytest

from tunix_reverb.sharding import hlo
from tunix_reverb.sharding import mesh as mesh_lib

_MESH = {'data': 1, 'fsdp': 2, 'sequence': 1, 'tensor': 4}

# Compiled text as on TPU: typed operands, layouts, tuples, an asynchronous
# gather, groups in all three notations. The outer loop goes 5 rounds and says
# so, the inner one as many as its data says.
_COMPILED = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inner_condition (p: (s32[], s32[], f32[4,8])) -> pred[] {
  %p = (s32[], s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%inner_body (p: (s32[], s32[], f32[4,8])) -> (s32[], s32[], f32[4,8]) {
  %p = (s32[], s32[], f32[4,8]{1,0}) parameter(0)
  %a = f32[4,8]{1,0} get-tuple-element(%p), index=2
  %b = f32[8,16]{1,0} broadcast(%a), dimensions={}
  %dot = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, operand_precision={high,high}
  ROOT %out = (s32[], s32[], f32[4,8]{1,0}) tuple(%p)
}

%fused (q: bf16[8,32]) -> bf16[8,64] {
  %q = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[32,64]{1,0} broadcast(%q), dimensions={}
  ROOT %dot.2 = bf16[8,64]{1,0} dot(bf16[8,32]{1,0} %q, bf16[32,64]{1,0} %w), \
lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], /*index=1*/bf16[8,32])) -> (s32[], bf16[8,32]) {
  %p = (s32[], /*index=1*/bf16[8,32]{1,0:T(8,128)(2,1)}) parameter(0)
  %start = (bf16[8,8]{1,0}, bf16[8,32]{1,0}) all-gather-start(%p), \
channel_id=1, replica_groups=[2,4]<=[8], dimensions={1}
  %done = bf16[8,32]{1,0} all-gather-done(%start)
  %scatter = f32[2,8]{1,0} reduce-scatter(%done), channel_id=2, \
replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, to_apply=%add
  %fusion = bf16[8,64]{1,0} fusion(%done), kind=kOutput, calls=%fused
  %loop = (s32[], s32[], f32[4,8]{1,0}) while(%p), \
condition=%inner_condition, body=%inner_body
  ROOT %out = (s32[], bf16[8,32]{1,0}) tuple(%p)
}

%condition (p: (s32[], bf16[8,32])) -> pred[] {
  %p = (s32[], bf16[8,32]{1,0}) parameter(0)
  ROOT %f = pred[] fusion(%p), kind=kLoop, calls=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %sum.1 = (f32[8]{0}, f32[4]{0}) all-reduce(%x, %x), channel_id=3, \
replica_groups=mesh['data'=1,'fsdp'=2,'sequence'=1,'tensor'=4] \
{'fsdp','sequence','tensor'}, use_global_device_ids=true, to_apply=%add
  %alone = f32[8]{0} all-gather(%x), channel_id=4, \
replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, dimensions={0}
  %shift = (f32[8]{0}, f32[8]{0}, u32[], u32[]) \
collective-permute-start(%x), channel_id=5, source_target_pairs={{0,1},{1,2}}
  %loop.1 = (s32[], bf16[8,32]{1,0}) while(%x), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %out = f32[8]{0} copy(%x)
}
"""


def _by_kind(costs: hlo.Costs) -> dict:
  return {(c.kind, c.axes): c for c in costs.collectives}


def test_collectives_count_as_often_as_their_loop_goes_round():
  found = _by_kind(hlo.costs(_COMPILED, _MESH, unknown_trips=3.0))
  assert {k: (c.count, c.sent_bytes) for k, c in found.items()} == {
    # 512 bytes of results, a quarter of which is there already.
    ('all-gather', ('tensor',)): (5, 5 * 512 * 3 / 4),
    # 64 bytes of results from twice as much.
    ('reduce-scatter', ('fsdp',)): (5, 5 * 64),
    ('all-reduce', ('fsdp', 'tensor')): (1, 2 * 48 * 7 / 8),
    ('collective-permute', ('tensor',)): (1, 32),
  }


def test_a_fused_reduce_scatter_is_not_taken_for_an_all_reduce():
  text = """\
HloModule m

%all-reduce-scatter.2.clone (x: bf16[64]) -> bf16[16] {
  %x = bf16[64]{0} parameter(0)
  %all = bf16[64]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %own = bf16[16]{0} dynamic-slice(%all), dynamic_slice_sizes={16}
}

ENTRY %main (x: bf16[64]) -> bf16[16] {
  %x = bf16[64]{0} parameter(0)
  ROOT %y = bf16[16]{0} fusion(%x), kind=kCustom, \
calls=%all-reduce-scatter.2.clone
}
"""
  (collective,) = hlo.costs(text, _MESH, unknown_trips=1).collectives
  assert collective.kind == 'reduce-scatter'
  assert collective.sent_bytes == 2 * 64 * 3 / 4


def test_products_count_as_often_as_all_loops_around_them():
  costs = hlo.costs(_COMPILED, _MESH, unknown_trips=3.0)
  products = {p.dtype: p for p in costs.products}
  assert products['bf16'].flops == 5 * 2 * 8 * 32 * 64
  assert products['bf16'].moved_bytes == 5 * 2 * (8 * 32 + 32 * 64 + 8 * 64)
  assert products['bf16'].precision == 'default'
  assert products['f32'].flops == 5 * 3 * 2 * 4 * 8 * 16
  assert products['f32'].precision == 'high'
  # In a loop of unknown length: a kernel that keeps its blocks on the chip.
  assert products['f32'].moved_bytes == 0
  assert costs.flops == sum(p.flops for p in costs.products)


@pytest.mark.parametrize(
  'groups,axes',
  [
    ('[4,2]<=[2,4]T(1,0)', ('fsdp',)),
    ('[2,4]<=[8]', ('tensor',)),
    ('[1,8]<=[8]', ('fsdp', 'tensor')),
    ('{{0,4},{1,5}}', ('fsdp',)),
    ('{{0,1,2,3},{4,5,6,7}}', ('tensor',)),
    ('{}', ('fsdp', 'tensor')),
    ("mesh['data'=1,'fsdp'=2] {'sequence','fsdp'}", ('fsdp',)),
  ],
)
def test_groups_of_devices_are_named_by_axes(groups, axes):
  text = (
    'HloModule m\n\nENTRY main {\n  x = f32[8]{0} parameter(0)\n'
    f'  ROOT y = f32[8]{{0}} all-reduce(x), replica_groups={groups}, '
    'to_apply=add\n}\n'
  )
  (collective,) = hlo.costs(text, _MESH, unknown_trips=1).collectives
  assert collective.axes == axes


@pytest.mark.parametrize('text', ['module @jit_step {\n}\n', 'HloModule m\n'])
def test_other_text_is_refused(text):
  with pytest.raises(ValueError, match='text must be HLO'):
    hlo.costs(text, _MESH, unknown_trips=1)


def _scanned_program(num_rounds):
  """Gathers w [16, 8 per device], multiplies, sums and scatters, in a scan."""
  mesh = mesh_lib.make_mesh(jax.devices()[:8], data=1, fsdp=2, tensor=4)

  def step(x, w):
    def body(x, _):
      whole = jax.lax.all_gather(w, mesh_lib.FSDP, axis=1, tiled=True)
      y = jax.lax.psum(x @ whole, mesh_lib.TENSOR)
      y = jax.lax.psum_scatter(
        y, mesh_lib.FSDP, scatter_dimension=1, tiled=True
      )
      return y @ w.T, ()

    return jax.lax.scan(body, x, None, length=num_rounds)[0]

  whole = mesh_lib.replicated_spec()
  split = mesh_lib.PartitionSpec(None, mesh_lib.FSDP)
  fn = mesh_lib.shard_map(
    step, mesh=mesh, in_specs=(whole, split), out_specs=whole
  )
  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
  return jax.jit(fn).lower(shape(8, 16), shape(16, 16)), dict(mesh.shape)


@pytest.mark.parametrize('stage', ['lowered', 'compiled'])
def test_agrees_with_a_program_of_this_jax(stage):
  lowered, mesh_shape = _scanned_program(num_rounds=7)
  if stage == 'lowered':
    text = lowered.as_text(dialect='hlo')
  else:
    text = lowered.compile().as_text()
  costs = hlo.costs(text, mesh_shape, unknown_trips=1)
  found = _by_kind(costs)
  assert costs.flops == 7 * 2 * (8 * 16 * 16 + 8 * 8 * 16)
  reduced = found['all-reduce', ('tensor',)]
  assert (reduced.count, reduced.sent_bytes) == (7, 7 * 2 * 512 * 3 / 4)
  scattered = found['reduce-scatter', ('fsdp',)]
  assert (scattered.count, scattered.sent_bytes) == (7, 7 * 256)
  # The compiler may take the gather out of the loop.
  gathered = found['all-gather', ('fsdp',)]
  assert gathered.count in ((7,) if stage == 'lowered' else (1, 7))
  assert gathered.sent_bytes == gathered.count * 1024 / 2
