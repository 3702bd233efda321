"""Programs as text: turns of loops, and traffic to and from HBM."""

import pytest

from adaptive_span_jax.planning import hlo
from adaptive_span_jax.planning.bundles import ScheduleError
from tests.support.programs import FAR_PROGRAM


def test_turns_of_program_loops_are_the_constants_of_their_conditions():
    program = hlo.parse(FAR_PROGRAM)
    [layers] = program.loops("main")
    [heads] = program.loops(program.body(layers))
    assert (layers.name, program.turns(layers)) == ("while.1", 3)
    assert (heads.name, program.turns(heads)) == ("while.2", None)
    assert heads.scope == "jit(train_step)/jvp(turns_0_3)/while/body/shard_map/while"
    with pytest.raises(ScheduleError, match="does not count up"):
        hlo.parse(FAR_PROGRAM.replace("direction=LT", "direction=NE")).turns(layers)
    with pytest.raises(ScheduleError, match="no entry"):
        hlo.parse(FAR_PROGRAM.replace("ENTRY ", ""))


TRAFFIC = """
%sliced (p0: f32[12,256,128], p1: s32[]) -> f32[256,128] {
  %p0 = f32[12,256,128]{2,1,0:T(8,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  %cut = f32[1,256,128]{2,1,0:T(8,128)} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={1,256,128}
  ROOT %same = f32[256,128]{1,0:T(8,128)} bitcast(%cut)
}

%updated (p2: f32[12,256,128], p3: f32[1,256,128], p4: s32[]) -> f32[12,256,128] {
  %p2 = f32[12,256,128]{2,1,0:T(8,128)} parameter(0)
  %p3 = f32[1,256,128]{2,1,0:T(8,128)} parameter(1)
  %p4 = s32[]{:T(128)} parameter(2)
  ROOT %put = f32[12,256,128]{2,1,0:T(8,128)} dynamic-update-slice(%p2, %p3, %p4, %p4, %p4)
}

ENTRY %main (a: f32[12,256,128], b: f32[1,256,128], i: s32[]) -> f32[12,256,128] {
  %a = f32[12,256,128]{2,1,0:T(8,128)} parameter(0)
  %b = f32[1,256,128]{2,1,0:T(8,128)S(1)} parameter(1)
  %i = s32[]{:T(128)} parameter(2)
  %padded = f32[256,1]{1,0:T(8,128)} iota(), iota_dimension=0
  %packed = bf16[8,100]{1,0:T(8,128)(2,1)S(1)} convert(%padded)
  %fetch = (f32[256,128]{1,0:T(8,128)S(1)}, f32[256,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %fusion.1 = f32[256,128]{1,0:T(8,128)S(1)} fusion(%a, /*index=1*/%i), kind=kLoop, calls=%sliced
  ROOT %fusion.2 = f32[12,256,128]{2,1,0:T(8,128)} fusion(%a, %b, %i), kind=kLoop, calls=%updated
}
"""


def test_traffic_is_what_goes_to_and_from_hbm():
    program = hlo.parse(TRAFFIC)
    moved = {name: program.traffic(each, "main") for name, each in program.computations["main"].items()}
    row = 256 * 128 * 4
    assert moved["fusion.1"] == row + 4  # a slice, and the index; the result stays on the chip
    assert moved["fusion.2"] == row + 4  # the update alone is written; it comes from the chip
    assert moved["padded"] == row  # padded to whole tiles
    assert moved["packed"] == row  # read only
    assert moved["fetch"] == row
