"""Cycles from the TPU compiler's schedules: hand-made ones, and those of the compiler itself."""

import csv
import importlib.util
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import flops
from adaptive_span_jax.planning import bundles, cycles, dump, hlo, roofline
from adaptive_span_jax.planning.bundles import ScheduleError
from adaptive_span_jax.planning.topology import CHIPS, Machine
from configs import enwik8
from tests.conftest import tiny_config

TABLE = Path(__file__).parents[2] / "docs" / "tpu_cycles.csv"

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -r requirements-tpu.txt"
)

SLOTS = ("",) * bundles.JUMP_SLOTS


def listing(*contents: str) -> str:
    """Bundles as the compiler writes them; `@5` starts region 5, `PF` is where skipped bundles continue."""
    lines = ["= control target key start", "LB: loop body", "= control target key end", ""]
    for address, content in enumerate(contents):
        regions = [word[1:] for word in content.split() if word[0] == "@"]
        inside = " ".join(word for word in content.split() if word[0] != "@" and word != "PF")
        label = "PF" if "PF" in content.split() else "LB" if regions else "  "
        comment = " :: ".join(f"Start region {region}" for region in regions)
        depth = "> " if inside else ""  # an empty bundle shows no depth
        lines.append(f"{address:#6x} {label}: {depth}{{ {inside} }} {f'/* {comment} */' if comment else ''}".rstrip())
    return "\n".join(lines)


def count(*contents: str) -> bundles.Count:
    return bundles.count(bundles.parse(listing(*contents)))


def skip(predicate: str, region: int) -> tuple[str, ...]:
    """A jump to a region where the predicate holds, with the bundles before it happens."""
    return (f"%9 = sbr.rel (%{predicate}) target = $region{region}", *SLOTS)


def loop(number: int, *body: str, turns: int | str = 4) -> tuple[str, ...]:
    """A loop that counts %s{number} up to a constant or a register: its body and 3 + JUMP_SLOTS bundles."""
    return (
        f"@{number} %s{number} = sphi %s0, %s{number}9",
        *body,
        f"%s{number}9 = sadd.s32 1, %s{number} ;; %p{number} = scmp.ge.s32.totalorder %s{number}9, {turns}",
        f"%8 = sbr.rel (!%p{number}) target = $region{number}",
        *SLOTS,
    )


AROUND = 3 + bundles.JUMP_SLOTS  # bundles of an empty loop


def test_every_bundle_is_a_cycle_and_a_delay_is_more():
    assert count("%1 = vld", "", "%2 = vadd", "%3 = vdelay 7", "").cycles == 5 + 7


def test_a_comment_may_go_over_several_lines():
    text = listing(*skip("p1", 5), *("%2 = vadd",) * 9, "PF", "%3 = vst")
    text = text.replace("PF: {  }", "PF: { %1 = dma /* window\nbounds: (1, 8)\n */ } /* Start/End empty region 5 */")
    assert bundles.parse(text).parts[0].body.own.cycles == 9


def test_loops_are_multiplied_out_with_the_bundles_after_their_jump():
    assert count("%1 = vld", *loop(10, "%2 = vadd", ""), "%3 = vst").cycles == 2 + 4 * (AROUND + 2)
    nested = loop(10, "%1 = vadd", *loop(20, "%2 = vmul", turns=3), turns=5)
    assert count(*nested, "").cycles == 5 * (AROUND + 1 + 3 * (AROUND + 1)) + 1


def test_a_branch_may_skip_a_loop_and_what_follows():
    before = 1 + bundles.JUMP_SLOTS
    assert count(*skip("p1", 5), *loop(10, turns=2), "PF @5").cycles == before + 2 * AROUND + 1
    assert count(*skip("p1", 5), *loop(10, turns=2), "%1 = vst", "PF @5").cycles == before + 2 * AROUND + 2


def test_loops_side_by_side_are_not_nested():
    assert count(*loop(10, turns=2), *loop(20, turns=3)).cycles == 5 * AROUND


def test_a_loop_whose_turns_depend_on_values_counts_once_and_is_noted():
    found = count(*loop(10, "%2 = vadd", *loop(20, turns="%s7"), turns=3))
    assert found.cycles == 3 * (AROUND + 1 + AROUND)
    assert found.unknown == 1


def test_of_two_opposite_branches_the_longer_counts():
    branches = (
        "%p1 = scmp.ge.s32.totalorder %s4, 0",
        *skip("p1", 5),
        *("%1 = vadd",) * 30,
        "PF @5 %p2 = scmp.lt.s32.totalorder %s4, 0",
        *skip("p2", 6),
        *("%1 = vadd",) * 50,
        "PF @6",
    )
    straight = 3 + 2 * (1 + bundles.JUMP_SLOTS)
    assert count(*branches).cycles == straight + 50
    other = [line.replace("%p2 = scmp.lt.s32.totalorder %s4", "%p2 = scmp.lt.s32.totalorder %s3") for line in branches]
    assert count(*other).cycles == straight + 80
    # The second value was spilled and loaded back.
    spilled = ["%7 = sst [smem:[#allocation3_spill]] %s4", "%s3 = sld [smem:[#allocation3_spill]]", *other]
    assert count(*spilled).cycles == 2 + straight + 50


def test_branches_on_the_loop_counter_are_taken_as_often_as_it_says():
    # As in a pipelined loop over 8 windows: the first of 10 turns only starts copies, the last only ends them.
    body = (
        "%p1 = scmp.ge.s32.totalorder %s10, 1 ;; %p2 = scmp.lt.s32.totalorder %s10, 9",
        "%p3 = pnand %p1, %p2",
        *skip("p3", 5),
        *("%1 = vmatmul.bf16.gmra.mxu0 %v1",) * 100,
        "PF @5",
    )
    found = count(*loop(10, *body, turns=10))
    assert found.cycles == 10 * (AROUND + 4 + bundles.JUMP_SLOTS) + 8 * 100
    assert found.rows == 8 * 100 * 16
    # The same by the number of the window before: -1 … 8.
    shifted = [
        line.replace("%s10, 1 ;;", "%s5, 0 ;; %s5 = sadd.s32 4294967295, %s10 ;;").replace("%s10, 9", "%s5, 8")
        for line in body
    ]
    assert count(*loop(10, *shifted, turns=10)).cycles == found.cycles


def test_products_are_counted_in_rows():
    kinds = ("vmatmul.bf16.gmra.mxu0", "vmatmul.msk.bf16.gmra.mxu1", "vmatmul.mubr.bf16.gmra.mxu0")
    assert count(*(f"%1 = {kind} %v1" for kind in kinds)).rows == 3 * 16
    assert count("%1 = vmatmul.lmr.bf16.gmra.16.mxu0 %v1", "%1 = vmatmul.f32.gmra.mxu0 %v1").rows == 2 * 8


def test_the_last_bundle_is_where_branches_without_another_place_continue():
    assert bundles.parse(listing(*skip("p1", 5), *("%1 = vadd",) * 9, "PF")).parts[0].body.own.cycles == 9


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ((), "no bundles"),
        (("%1 = sbr.abs %s3",), "a jump of unknown form"),
        ((*skip("p1", 5), "%1 = vadd"), "region 5, which starts nowhere"),
        ((*skip("p1", 5), *skip("p2", 6), "%1 = vadd", "@5 %1 = vadd", "@6 %1 = vadd"), "crosses another"),
        ((*skip("p1", 5), *loop(10, "%1 = vadd", "@5 %2 = vadd")), "crosses another"),
    ],
)
def test_schedules_that_are_not_understood_are_refused(contents, message):
    with pytest.raises(ScheduleError, match=message):
        count(*contents)


# The attention kernel -------------------------------------------------------------------------------------------


def kernel(*, programs: int = 6, loops: int = 2, other: str = "%p5 = scmp.lt.s32.totalorder %s70, 0") -> str:
    """A kernel with the structure of ours; %s70 is negative for short heads."""
    long = ("%1 = vadd",) * 11
    for number in range(loops):
        long += (*loop(20 + number, *("%1 = vadd",) * (100 * (number + 1)), turns="%s71"), "%1 = vadd")
    program = (
        "%p3 = scmp.ne.s32.totalorder %s60, 0",
        *skip("p3", 43),
        *("%1 = dma",) * 17,  # the first program
        "PF @43 %p4 = scmp.ge.s32.totalorder %s70, 0",
        *skip("p4", 44),
        *("%1 = vadd",) * 40,  # short heads
        f"PF @44 {other}",
        *skip("p5", 45),
        *long,
        "PF @45",
    )
    turn = (
        "%p1 = scmp.ge.s32.totalorder %s10, 1",
        f"%p2 = scmp.lt.s32.totalorder %s10, {programs + 1}",
        "%p9 = pnand %p1, %p2",
        *skip("p9", 41),
        *program,
        "PF @41",
    )
    return listing("%1 = vld", *loop(10, *turn, turns=programs + 2), "%1 = vst")


def test_the_pieces_of_a_kernel_are_found_by_their_structure():
    found = cycles.KernelCost.of(bundles.parse(kernel()))
    jump = 1 + bundles.JUMP_SLOTS
    assert found.programs == 6
    assert found.call.cycles == 2 + 8 * (AROUND + 4 + jump) + 17
    assert found.program.cycles == 4 + 3 * jump
    assert (found.short.cycles, found.fixed.cycles) == (40, 13)
    assert (found.full.cycles, found.masked.cycles) == (100 + AROUND, 200 + AROUND)


def test_a_kernel_takes_the_branches_and_turns_of_its_heads():
    cost = cycles.KernelCost.of(bundles.parse(kernel()))
    turns = cycles.KernelTurns(np.array([[True, False]]), np.array([[0, 3]]), np.array([[0, 2]]))
    once = cost.call.cycles + 6 * cost.program.cycles
    heads = cost.short.cycles + cost.fixed.cycles + 3 * cost.full.cycles + 2 * cost.masked.cycles
    assert cost.total(turns, streams=3).cycles == once + 3 * heads
    # Over layers it is the average.
    idle = cycles.KernelTurns(*(np.concatenate([array, np.zeros_like(array)]) for array in vars(turns).values()))
    assert cost.total(idle, streams=3).cycles == once + 3 * (heads + 2 * cost.fixed.cycles) / 2
    with pytest.raises(ScheduleError, match="6 programs for 4 streams × 2 heads"):
        cost.total(turns, streams=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (kernel(loops=1), "expected two loops in the long branch"),
        (kernel(loops=3), "expected two loops in the long branch"),
        (kernel(loops=0), "in one place, found them in 0"),
        (kernel(other="%p5 = scmp.lt.s32.totalorder %s99, 0"), "one of two opposite branches|in one place"),
        (listing(*loop(10, *loop(20, turns="%s7"), turns="%s3")), "a grid loop with constant turns"),
    ],
)
def test_kernels_of_another_structure_are_refused(text, message):
    with pytest.raises(ScheduleError, match=message):
        cycles.KernelCost.of(bundles.parse(text))


@pytest.mark.parametrize(
    ("z", "expected"),
    [
        (0.0, (True, 0, 0)),  # reaches 33
        (31.0, (True, 0, 0)),  # reaches 64
        (31.5, (True, 0, 0)),
        (32.0, (False, 0, 0)),  # reaches 65: one step, which is the last
        (95.5, (False, 0, 0)),  # reaches 128
        (96.0, (False, 0, 1)),  # reaches 129
        (127.2, (False, 1, 0)),  # the ramp starts after 128
        (2048.0, (False, 16, 0)),  # reaches 2081
        (8192.0, (False, 63, 0)),  # the limit; the last step always has a mask
    ],
)
def test_turns_of_the_kernel_follow_from_the_span(z, expected):
    found = cycles.kernel_turns(np.array([[z]]), 32, 8192)
    assert (found.short_LH.item(), found.full_LH.item(), found.masked_LH.item()) == expected


# Programs -------------------------------------------------------------------------------------------------------


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


FAR_PROGRAM = """
%limit.3 (c: (s32[])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %c = (s32[]{:T(128)}) parameter(0)
  %turn = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%turn, %three), direction=LT
}

%limit.segment (d: (s32[])) -> pred[] {
  %blocks = s32[]{:T(128)} constant(2)
  %d = (s32[]{:T(128)}) parameter(0)
  %turn.1 = s32[]{:T(128)} get-tuple-element(%d), index=0
  ROOT %less.1 = pred[]{:T(512)} compare(%turn.1, %blocks), direction=LT
}

%limit.value (e: (s32[], s32[])) -> pred[] {
  %e = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %turn.2 = s32[]{:T(128)} get-tuple-element(%e), index=0
  %end = s32[]{:T(128)} get-tuple-element(%e), index=1
  ROOT %less.2 = pred[]{:T(512)} compare(%turn.2, %end), direction=LT
}

%tile.memory (f: (s32[])) -> (s32[]) {
  %f = (s32[]{:T(128)}) parameter(0)
  ROOT %in.memory.tile = f32[8,128]{1,0:T(8,128)S(1)} copy(%f)
}

%tile.segment (g: (s32[])) -> (s32[]) {
  %g = (s32[]{:T(128)}) parameter(0)
  ROOT %in.segment.tile = f32[8,128]{1,0:T(8,128)S(1)} copy(%g)
}

%over.memory (h: (s32[])) -> (s32[]) {
  %h = (s32[]{:T(128)}) parameter(0)
  %in.memory = f32[8,128]{1,0:T(8,128)S(1)} copy(%h)
  ROOT %while.5 = (s32[]{:T(128)}) while(%h), condition=%limit.value, body=%tile.memory
}

%over.segment (j: (s32[])) -> (s32[]) {
  %j = (s32[]{:T(128)}) parameter(0)
  %in.segment = f32[8,128]{1,0:T(8,128)S(1)} copy(%j)
  ROOT %while.6 = (s32[]{:T(128)}) while(%j), condition=%limit.value, body=%tile.segment
}

%over.heads (k: (s32[])) -> (s32[]) {
  %k = (s32[]{:T(128)}) parameter(0)
  %in.head = f32[8,128]{1,0:T(8,128)S(1)} copy(%k)
  %while.3 = (s32[]{:T(128)}) while(%k), condition=%limit.value, body=%over.memory
  ROOT %while.4 = (s32[]{:T(128)}) while(%k), condition=%limit.segment, body=%over.segment
}

%layer (l: (s32[])) -> (s32[]) {
  %l = (s32[]{:T(128)}) parameter(0)
  %product = f32[8,128]{1,0:T(8,128)S(1)} copy(%l), metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/dot"}
  %near = f32[8,128]{1,0:T(8,128)S(1)} copy(%l), \
metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/shard_map/add"}
  %norm = f32[8,128]{1,0:T(8,128)S(1)} copy(%l), metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/add"}
  ROOT %while.2 = (s32[]{:T(128)}) while(%l), condition=%limit.value, body=%over.heads, \
metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/shard_map/while"}
}

ENTRY %main (m: (s32[])) -> (s32[]) {
  %m = (s32[]{:T(128)}) parameter(0)
  %adagrad = f32[8,128]{1,0:T(8,128)} copy(%m), metadata={op_name="jit(train_step)/add"}
  %all-reduce.1 = f32[8,128]{1,0:T(8,128)S(1)} all-reduce(%m)
  ROOT %while.1 = (s32[]{:T(128)}) while(%m), condition=%limit.3, body=%layer, \
metadata={op_name="jit(train_step)/jvp(turns_0_3)/while"}
}
"""

CONFIG = tiny_config(
    model={"layers": 3, "heads": 2},
    span={"limit": 512, "ramp": 5},
    train={"batch_size": 4, "segment": 256},
)


def straight(cycles: int, rows: int = 0) -> bundles.Block:
    return bundles.Block(bundles.Count(cycles, rows), (), ())


def far_dump(text: str = FAR_PROGRAM) -> dump.Dump:
    names = ("memory.tile", "segment.tile", "memory", "segment", "head")
    schedules = {f"in.{name}": straight(100 + number) for number, name in enumerate(names)}
    schedules |= {"near": straight(7), "norm": straight(11), "adagrad": straight(13), "all-reduce.1": straight(17)}
    schedules["product"] = straight(1000, rows=8000)
    return dump.Dump(hlo.parse(text), bundles.Block(bundles.Count(5), (), ("adagrad",)), schedules)


def test_far_loops_turn_as_often_as_the_spans_say():
    z_LH = np.array([[0.0, 200.0], [0.0, 0.0], [500.0, 90.0]])
    step = cycles.count_step(CONFIG, far_dump(), z_LH, chips=2)
    runs = {each.name: each.runs for each in step.operations}
    rows_X, tiles_LHX = (np.asarray(array) for array in flops.far_tiles(CONFIG, jnp.asarray(z_LH, jnp.float32)))
    assert len(rows_X) == 4 + 2  # blocks of memory, then of the segment
    # Three heads reach further than 64: 206, 506 and 96 positions, in blocks of 128.
    assert runs["in.head"] == pytest.approx(3)
    assert runs["in.memory"] == pytest.approx(2 + 4 + 1)
    assert runs["in.segment"] == pytest.approx(3 * 2)
    assert runs["in.memory.tile"] == pytest.approx(tiles_LHX[..., :4].sum())
    assert runs["in.segment.tile"] == pytest.approx(tiles_LHX[..., 4:].sum())
    assert runs["near"] == 3
    parts = {name: cost.cycles for name, cost in step.parts().items()}
    far = sum(runs[f"in.{name}"] * cost for name, cost in [("head", 104), ("memory", 102), ("segment", 103)])
    far += runs["in.memory.tile"] * 100 + runs["in.segment.tile"] * 101
    assert parts[cycles.FORWARD] == pytest.approx(far + 3 * 7)
    assert parts[cycles.BACKWARD] == 0
    # 8,000 rows take four MXUs longer than the schedule says.
    assert parts[cycles.DENSE] == 3 * 2000
    assert parts[cycles.LAYERS] == 3 * 11
    assert (parts[cycles.OUTSIDE], parts[cycles.COLLECTIVES], parts[cycles.CONTROL]) == (13, 17, 5)
    assert step.total.cycles == pytest.approx(sum(parts.values()))
    assert step.total.mxu_cycles == 6000
    assert step.parts()[cycles.OUTSIDE].hbm_bytes == 4 + 8 * 128 * 4  # what adagrad reads and writes
    assert step.most_expensive(1)[0].name == "product"


def test_loops_of_a_sandwich_turn_as_often_as_the_spans_of_their_own_layers_say():
    config = CONFIG.changed({"model.layers": 5, "model.sandwich": 2})
    # The program's scan over 3 layers, after another over 2 whose names end in _.
    first = re.sub(r"(%[\w.\-]+)", r"\1_", FAR_PROGRAM.replace("turns_0_3", "turns_0_2")).replace("(3)", "(2)")
    computations, _, entry = first.partition("ENTRY")
    scan = entry[entry.index("%while.1_") : entry.index("\n}")].replace("%m_", "%m")
    both = computations + FAR_PROGRAM.replace("turns_0_3", "turns_2_5").replace("ROOT %while.1", f"{scan}\n  %while.1")
    compiled = far_dump(both)
    compiled.schedules.update({f"{name}_": schedule for name, schedule in compiled.schedules.items()})
    z_LH = np.array([[0.0, 200.0], [0.0, 0.0], [500.0, 90.0], [70.0, 0.0], [0.0, 300.0]])
    step = cycles.count_step(config, compiled, z_LH, chips=2)
    runs = {each.name: each.runs for each in step.operations}
    for end, layers, heads, blocks in (("_", slice(0, 2), 1, 2), ("", slice(2, 5), 4, (4 + 1) + 1 + 3)):
        tiles_LHX = np.asarray(flops.far_tiles(config, jnp.asarray(z_LH[layers], jnp.float32))[1])
        assert runs[f"near{end}"] == len(z_LH[layers])
        assert runs[f"in.head{end}"] == pytest.approx(heads)
        assert runs[f"in.memory{end}"] == pytest.approx(blocks)
        assert runs[f"in.memory.tile{end}"] == pytest.approx(tiles_LHX[..., :4].sum())
        assert runs[f"in.segment.tile{end}"] == pytest.approx(tiles_LHX[..., 4:].sum())
    assert step.parts()[cycles.LAYERS].cycles == 5 * 11


def test_a_scan_of_one_turn_is_inlined_and_counted_all_the_same():
    config = CONFIG.changed({"model.layers": 1})
    layer = FAR_PROGRAM.partition("ENTRY")[0].replace("turns_0_3", "turns_0_1").replace("%layer (", "ENTRY %layer (")
    step = cycles.count_step(config, far_dump(layer), np.array([[500.0, 90.0]]), chips=2)
    runs = {each.name: each.runs for each in step.operations}
    assert (runs["near"], runs["in.head"], runs["in.memory"]) == (1, 2, 4 + 1)
    assert step.parts()[cycles.LAYERS].cycles == 11


def test_without_far_heads_far_loops_take_nothing():
    step = cycles.count_step(CONFIG, far_dump(), np.zeros((3, 2)), chips=2)
    assert step.parts()[cycles.FORWARD].cycles == 3 * 7


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("body=%layer", "body=%over.heads", "not the loops of attention/far.py"),
        ("constant(2)", "constant(5)", "not the loops of attention/far.py"),
        ("constant(3)", "constant(4)", "4 turns over 3 layers"),
        ("condition=%limit.3", "condition=%limit.value", "not a loop over far heads"),
        ("all-reduce(%m)", "call(%m), to_apply=%layer", "not understood"),
        ("copy(%l), metadata", "copy(%l", "closing parenthesis"),
        ("copy(%k)", "copy(%k)\n  %merged = f32[8]{0:T(128)} fusion(%k), calls=%layer", "merged: .* no schedule"),
    ],
)
def test_programs_that_are_not_understood_are_refused(old, new, message):
    assert old in FAR_PROGRAM
    with pytest.raises(ScheduleError, match=message):
        cycles.count_step(CONFIG, far_dump(FAR_PROGRAM.replace(old, new)), np.full((3, 2), 200.0), chips=2)


KERNEL_PROGRAM = FAR_PROGRAM.replace(
    "ROOT %while.2 = (s32[]{:T(128)}) while(%l), condition=%limit.value, body=%over.heads, ",
    "%ring = bf16[3,2,768,22]{3,2,1,0:T(8,128)(2,1)} copy(%l)\n"
    '  ROOT %span_forward.1 = f32[8,128]{1,0:T(8,128)S(1)} custom-call(%ring), custom_call_target="tpu_custom_call", ',
)


def test_kernels_are_counted_with_the_turns_of_their_heads():
    compiled = far_dump(KERNEL_PROGRAM)
    compiled.schedules["span_forward.1"] = bundles.parse(kernel(programs=4))
    z_LH = np.array([[0.0, 200.0], [0.0, 0.0], [500.0, 126.0]])
    step = cycles.count_step(CONFIG, compiled, z_LH, chips=2)
    [found] = [each for each in step.operations if each.name == "span_forward.1"]
    cost = cycles.kernels(compiled)["span_forward.1"]
    # Short: 3 heads. Steps before the last, by reach: 206 → 1 full; 506 → 3 full; 132 → 1 masked. Two streams a chip.
    heads = 3 * cost.short.cycles + 3 * cost.fixed.cycles + 4 * cost.full.cycles + cost.masked.cycles
    assert found.cost.cycles == pytest.approx(3 * (cost.call.cycles + 4 * cost.program.cycles) + 2 * heads)
    assert found.part == cycles.FORWARD
    # The kernel copies a block of memory for each step but the first.
    assert found.cost.hbm_bytes == pytest.approx(2 * 5 * 128 * 22 * 2)
    # Two cores of one chip that take half of four streams each: the same time.
    shared = cycles.count_step(CONFIG, compiled, z_LH, chips=1)
    [on_two_cores] = [each for each in shared.operations if each.name == "span_forward.1"]
    assert on_two_cores.cost.cycles == found.cost.cycles
    with pytest.raises(ScheduleError, match=r"span_forward\.1: the kernel's grid has 4 programs for 1 streams"):
        cycles.count_step(CONFIG, compiled, z_LH, chips=4)
    compiled.schedules["other.1"] = compiled.schedules.pop("span_forward.1")
    renamed = dump.Dump(
        hlo.parse(KERNEL_PROGRAM.replace("span_forward.1", "other.1")), compiled.control, compiled.schedules
    )
    with pytest.raises(ScheduleError, match="unknown kernel"):
        cycles.count_step(CONFIG, renamed, z_LH, chips=2)


def test_kernels_for_persistent_vectors_take_the_same_at_any_span():
    compiled = far_dump(KERNEL_PROGRAM.replace("span_forward.1", "persistent_backward.1"))
    schedule = bundles.parse(listing(*loop(10, *loop(20, *("%1 = vadd",) * 100, turns=8), turns=4)))
    compiled.schedules["persistent_backward.1"] = schedule
    for z in (0.0, 500.0):
        step = cycles.count_step(CONFIG, compiled, np.full((3, 2), z), chips=2)
        [found] = [each for each in step.operations if each.name == "persistent_backward.1"]
        assert found.cost.cycles == 3 * 4 * (8 * (100 + AROUND) + AROUND)
        assert (found.part, found.assumed) == (cycles.BACKWARD, False)
        assert found.cost.hbm_bytes > 2 * 3 * 3 * 2 * 768 * 22  # the whole operand, in each layer
    assert cycles.kernels(compiled) == {}
    compiled.schedules["persistent_backward.1"] = bundles.parse(listing(*loop(10, "%1 = vadd", turns="%s3")))
    with pytest.raises(ScheduleError, match=r"persistent_backward\.1: expected loops with constant turns"):
        cycles.count_step(CONFIG, compiled, np.zeros((3, 2)), chips=2)


def test_clocks_follow_from_published_peaks():
    assert {name: round(cycles.clock(CHIPS[name]) / 1e9, 2) for name in ("v5e", "v6e", "v5p")} == {
        "v5e": 1.5,
        "v6e": 1.75,
        "v5p": 1.75,
    }


def test_an_operation_takes_as_long_as_its_traffic():
    chip = CHIPS["v5e"]
    busy = cycles.Operation("busy", cycles.DENSE, 1, cycles.Cost(1000.0))
    bound = cycles.Operation("bound", cycles.OUTSIDE, 1, cycles.Cost(10.0, 0, 819e9 * 1e-6))  # a microsecond
    ahead = cycles.Operation("ahead", cycles.OUTSIDE, 1, cycles.Cost(0, 0, 819e9 * 0.5e-6))
    microsecond = cycles.clock(chip) * 1e-6
    assert cycles.StepCount([busy, bound, ahead]).with_hbm(chip) == pytest.approx(1000 + microsecond)
    assert cycles.StepCount([bound, ahead]).with_hbm(chip) == pytest.approx(1.5 * microsecond)


# The compiler ---------------------------------------------------------------------------------------------------


def test_only_tpus_have_schedules():
    with pytest.raises(UserError, match="only the TPU compiler"):
        dump.compile_step(CONFIG, Machine.parse("a100:8"))


def test_a_compilation_that_fails_is_reported_with_its_reason():
    with pytest.raises(UserError, match=r"(?s)compiling failed.*out of luck"):
        dump.run([sys.executable, "-c", "raise SystemExit('out of luck')"], {}, "compiling")


def test_a_compiler_that_writes_no_schedules_is_an_error(tmp_path):
    with pytest.raises(ScheduleError, match="wrote no schedules"):
        dump.read(tmp_path, FAR_PROGRAM)


PRODUCT = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from adaptive_span_jax.planning.dump import HLO_FILE
from adaptive_span_jax.planning.topology import Machine
job = json.load(sys.stdin)
device = jax.sharding.SingleDeviceSharding(Machine.parse(job["topology"]).devices()[0])
left, right = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device) for shape in ((1024, 2048), (2048, 2048)))
program = jax.jit(lambda left, right: left @ right).lower(left, right).compile()
(Path(job["folder"]) / HLO_FILE).write_text(program.as_text())
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("topology", "limit"), [("v5e:2x4", 65_536), ("v6e:2x4", 16_384), ("v5p:2x2x2", 32_768)])
def test_a_product_takes_about_as_long_as_the_mxus(topology, limit):
    compiled = dump.run([sys.executable, "-c", PRODUCT], {"topology": topology}, "compiling a product")
    [found] = [counted for each in compiled.schedules.values() if (counted := bundles.count(each)).rows]
    cost = cycles.Operation.of("product", cycles.DENSE, 1, found, 0).cost
    assert cost.mxu_cycles == limit == 1024 * 2048 * 2048 / cycles._MULTIPLY_ADDS[Machine.parse(topology).chip.name]
    assert limit <= cost.cycles < 1.1 * limit
    assert found.cycles > 0.85 * limit


@needs_libtpu
@pytest.mark.slow
def test_a_small_step_is_counted():
    config = tiny_config(
        model={"layers": 3, "width": 128, "heads": 2, "feedforward": 256, "dropout": 0.1, "compute_dtype": "bfloat16"},
        span={"limit": 512, "ramp": 32},
        train={"batch_size": 8, "segment": 256},
    )
    compiled = dump.compile_step(config, Machine.parse("v5e:2x2"))
    start, longest = (cycles.count_step(config, compiled, np.full((3, 2), z), chips=4) for z in (0.0, 512.0))
    assert all(cost.cycles > 0 for cost in start.parts().values())
    assert all(each.cost.cycles >= each.cost.mxu_cycles for each in longest.operations)
    assert longest.parts()[cycles.FORWARD].cycles > start.parts()[cycles.FORWARD].cycles
    assert longest.parts()[cycles.BACKWARD].cycles > start.parts()[cycles.BACKWARD].cycles
    assert longest.parts()[cycles.DENSE] == start.parts()[cycles.DENSE]


@pytest.mark.slow
@needs_libtpu
def test_a_step_takes_the_cycles_of_the_committed_table():
    fields = enwik8.get_config()
    fields.model.compute_dtype = "bfloat16"
    config = Config.from_dict(fields.to_dict())
    compiled = dump.compile_step(config, Machine.parse("v5e:2x4"))
    shape = (config.model.layers, config.model.heads)
    spans = {"start": np.zeros(shape), "trained": roofline.trained_profile(config), "2048": np.full(shape, 2048.0)}
    table = {
        row["spans"]: row
        for row in csv.DictReader(TABLE.read_text().splitlines())
        if (row["config"], row["topology"]) == ("enwik8", "v5e:2x4")
    }
    for setting, z_LH in spans.items():
        step = cycles.count_step(config, compiled, z_LH, chips=8)
        found = {"cycles": step.total.cycles, "dense": step.parts()[cycles.DENSE].cycles}
        for kernel_name in ("forward", "backward"):
            [operation] = [each for each in step.operations if each.name.startswith(f"span_{kernel_name}")]
            found[f"{kernel_name}_kernel"] = operation.cost.cycles
        assert found == pytest.approx({name: float(table[setting][name]) for name in found}, rel=0.03), setting
