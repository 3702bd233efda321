"""Cycles of a step: of hand-made programs and schedules, and of those of the TPU compiler itself."""

import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import flops
from adaptive_span_jax.model.attention.inputs import FarShape
from adaptive_span_jax.planning import bundles, cycles, dump, hlo
from adaptive_span_jax.planning.bundles import ScheduleError
from adaptive_span_jax.planning.topology import CHIPS, Machine
from tests.conftest import needs_libtpu, tiny_config
from tests.support.programs import FAR_CONFIG, FAR_PROGRAM, far_dump
from tests.support.schedules import AROUND, kernel, listing, loop


def test_far_loops_turn_as_often_as_the_spans_say():
    z_LH = np.array([[0.0, 200.0], [0.0, 0.0], [500.0, 90.0]])
    step = cycles.count_step(FAR_CONFIG, far_dump(), z_LH, chips=2)
    runs = {each.name: each.runs for each in step.operations}
    of_far = flops.far_tiles(FAR_CONFIG, jnp.asarray(z_LH, jnp.float32), FarShape.on("tpu"))
    rows_X, tiles_LHX = (np.asarray(array) for array in of_far)
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
    assert step.most_expensive(CHIPS["v5e"], 1)[0].name == "product"
    assert step.most_expensive(CHIPS["v5e"], 1)[0].scope == "jit(train_step)/jvp(turns_0_3)/while/body/dot"


def test_loops_of_a_sandwich_turn_as_often_as_the_spans_of_their_own_layers_say():
    config = FAR_CONFIG.changed({"model.layers": 5, "model.sandwich": 2})
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
        tiles_LHX = np.asarray(flops.far_tiles(config, jnp.asarray(z_LH[layers], jnp.float32), FarShape.on("tpu"))[1])
        assert runs[f"near{end}"] == len(z_LH[layers])
        assert runs[f"in.head{end}"] == pytest.approx(heads)
        assert runs[f"in.memory{end}"] == pytest.approx(blocks)
        assert runs[f"in.memory.tile{end}"] == pytest.approx(tiles_LHX[..., :4].sum())
        assert runs[f"in.segment.tile{end}"] == pytest.approx(tiles_LHX[..., 4:].sum())
    assert step.parts()[cycles.LAYERS].cycles == 5 * 11


def test_a_scan_of_one_turn_is_inlined_and_counted_all_the_same():
    config = FAR_CONFIG.changed({"model.layers": 1})
    layer = FAR_PROGRAM.partition("ENTRY")[0].replace("turns_0_3", "turns_0_1").replace("%layer (", "ENTRY %layer (")
    step = cycles.count_step(config, far_dump(layer), np.array([[500.0, 90.0]]), chips=2)
    runs = {each.name: each.runs for each in step.operations}
    assert (runs["near"], runs["in.head"], runs["in.memory"]) == (1, 2, 4 + 1)
    assert step.parts()[cycles.LAYERS].cycles == 11


def test_without_far_heads_far_loops_take_nothing():
    step = cycles.count_step(FAR_CONFIG, far_dump(), np.zeros((3, 2)), chips=2)
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
        cycles.count_step(FAR_CONFIG, far_dump(FAR_PROGRAM.replace(old, new)), np.full((3, 2), 200.0), chips=2)


KERNEL_PROGRAM = FAR_PROGRAM.replace(
    "ROOT %while.2 = (s32[]{:T(128)}) while(%l), condition=%limit.value, body=%over.heads, ",
    "%ring = bf16[3,2,768,22]{3,2,1,0:T(8,128)(2,1)} copy(%l)\n"
    '  ROOT %span_forward.1 = f32[8,128]{1,0:T(8,128)S(1)} custom-call(%ring), custom_call_target="tpu_custom_call", ',
)


def test_kernels_are_counted_with_the_turns_of_their_heads():
    compiled = far_dump(KERNEL_PROGRAM)
    compiled.schedules["span_forward.1"] = bundles.parse(kernel(programs=4))
    z_LH = np.array([[0.0, 200.0], [0.0, 0.0], [500.0, 126.0]])
    step = cycles.count_step(FAR_CONFIG, compiled, z_LH, chips=2)
    [found] = [each for each in step.operations if each.name == "span_forward.1"]
    cost = cycles.kernels(compiled)["span_forward.1"]
    # Short: 3 heads. Steps before the last, by reach: 206 → 1 full; 506 → 3 full; 132 → 1 masked. Two streams a chip.
    heads = 3 * cost.short.cycles + 3 * cost.fixed.cycles + 4 * cost.full.cycles + cost.masked.cycles
    assert found.cost.cycles == pytest.approx(3 * (cost.call.cycles + 4 * cost.program.cycles) + 2 * heads)
    assert found.part == cycles.FORWARD
    # The kernel copies a block of memory for each step but the first.
    assert found.cost.hbm_bytes == pytest.approx(2 * 5 * 128 * 22 * 2)
    # Two cores of one chip that take half of four streams each: the same time.
    shared = cycles.count_step(FAR_CONFIG, compiled, z_LH, chips=1)
    [on_two_cores] = [each for each in shared.operations if each.name == "span_forward.1"]
    assert on_two_cores.cost.cycles == found.cost.cycles
    with pytest.raises(ScheduleError, match=r"span_forward\.1: the kernel's grid has 4 programs for 1 streams"):
        cycles.count_step(FAR_CONFIG, compiled, z_LH, chips=4)
    compiled.schedules["other.1"] = compiled.schedules.pop("span_forward.1")
    renamed = dump.Dump(
        hlo.parse(KERNEL_PROGRAM.replace("span_forward.1", "other.1")), compiled.control, compiled.schedules
    )
    with pytest.raises(ScheduleError, match="unknown kernel"):
        cycles.count_step(FAR_CONFIG, renamed, z_LH, chips=2)


def test_kernels_for_persistent_vectors_take_the_same_at_any_span():
    compiled = far_dump(KERNEL_PROGRAM.replace("span_forward.1", "persistent_backward.1"))
    schedule = bundles.parse(listing(*loop(10, *loop(20, *("%1 = vadd",) * 100, turns=8), turns=4)))
    compiled.schedules["persistent_backward.1"] = schedule
    for z in (0.0, 500.0):
        step = cycles.count_step(FAR_CONFIG, compiled, np.full((3, 2), z), chips=2)
        [found] = [each for each in step.operations if each.name == "persistent_backward.1"]
        assert found.cost.cycles == 3 * 4 * (8 * (100 + AROUND) + AROUND)
        assert (found.part, found.assumed) == (cycles.BACKWARD, False)
        assert found.cost.hbm_bytes > 2 * 3 * 3 * 2 * 768 * 22  # the whole operand, in each layer
    assert cycles.kernels(compiled) == {}
    compiled.schedules["persistent_backward.1"] = bundles.parse(listing(*loop(10, "%1 = vadd", turns="%s3")))
    with pytest.raises(ScheduleError, match=r"persistent_backward\.1: expected loops with constant turns"):
        cycles.count_step(FAR_CONFIG, compiled, np.zeros((3, 2)), chips=2)


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


def test_the_limit_is_hbm_or_the_busiest_unit():
    chip = CHIPS["v5e"]
    microsecond = cycles.clock(chip) * 1e-6
    units = (100.0, 700.0, 0.0, 0.0, 200.0, 0.0)
    assert cycles.Cost(1000.0, 0, 0, units).limit(chip) == ("VALU", 0.7)
    assert cycles.Cost(1000.0, 900.0, 0, units).limit(chip) == ("MXU", 0.9)
    moved = cycles.Cost(1000.0, 900.0, 819e9 * 1e-6, units)
    assert moved.limit(chip) == ("HBM", pytest.approx(1))
    assert moved.with_hbm(chip) == pytest.approx(microsecond)
    operations = [
        cycles.Operation("product", cycles.DENSE, 1, cycles.Cost(1000.0, 900.0)),
        cycles.Operation("other", cycles.DENSE, 1, cycles.Cost(600.0, 400.0)),
        cycles.Operation("moved", cycles.OUTSIDE, 1, moved),
        cycles.Operation("ahead", cycles.OUTSIDE, 1, cycles.Cost(0, 0, 819.0)),
    ]
    step = cycles.StepCount(operations)
    assert list(step.limits(chip)) == ["MXU", "HBM"]
    assert step.limits(chip) == pytest.approx({"HBM": microsecond, "MXU": 1600})
    assert [each.name for each in step.most_expensive(chip, 2)] == ["moved", "product"]
    assert step.seconds(chip) == pytest.approx(1e-6 + 1600 / cycles.clock(chip))


# The compiler ---------------------------------------------------------------------------------------------------


def test_only_tpus_have_schedules():
    with pytest.raises(UserError, match="only the TPU compiler"):
        dump.compile_step(FAR_CONFIG, Machine.parse("a100:8"))


def test_a_compilation_that_fails_is_reported_with_its_reason():
    with (
        pytest.raises(UserError, match=r"(?s)compiling failed.*out of luck"),
        dump.run([sys.executable, "-c", "raise SystemExit('out of luck')"], {}, "compiling"),
    ):
        pass


def test_a_compiler_that_writes_no_schedules_is_an_error(tmp_path):
    with pytest.raises(ScheduleError, match="wrote no schedules"):
        dump.read(tmp_path, FAR_PROGRAM)


PRODUCT = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from adaptive_span_jax.planning.topology import Machine
job = json.load(sys.stdin)
device = jax.sharding.SingleDeviceSharding(Machine.parse(job["topology"]).devices()[0])
left, right = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=device) for shape in ((1024, 2048), (2048, 2048)))
program = jax.jit(lambda left, right: left @ right).lower(left, right).compile()
(Path(job["folder"]) / "product.hlo").write_text(program.as_text())
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(("topology", "limit"), [("v5e:2x4", 65_536), ("v6e:2x4", 16_384), ("v5p:2x2x2", 32_768)])
def test_a_product_takes_about_as_long_as_the_mxus(topology, limit):
    with dump.run([sys.executable, "-c", PRODUCT], {"topology": topology}, "compiling a product") as folder:
        compiled = dump.read(folder, (folder / "product.hlo").read_text())
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
    fit, compiled = dump.compile_step(config, Machine.parse("v5e:2x2"))
    assert fit.fits
    assert compiled is not None
    start, longest = (cycles.count_step(config, compiled, np.full((3, 2), z), chips=4) for z in (0.0, 512.0))
    assert all(cost.cycles > 0 for cost in start.parts().values())
    assert all(each.cost.cycles >= each.cost.mxu_cycles for each in longest.operations)
    assert longest.parts()[cycles.FORWARD].cycles > start.parts()[cycles.FORWARD].cycles
    assert longest.parts()[cycles.BACKWARD].cycles > start.parts()[cycles.BACKWARD].cycles
    assert longest.parts()[cycles.DENSE] == start.parts()[cycles.DENSE]
    chip = CHIPS["v5e"]
    assert sum(longest.limits(chip).values()) == pytest.approx(longest.with_hbm(chip))
    for each in longest.most_expensive(chip, 10):
        unit, busy = each.cost.limit(chip)
        assert 0.1 < busy <= 1, (each.name, unit)
        assert each.name.startswith("span_") == ("pallas_call" in each.scope)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("change", [{"span.kind": "dynamic"}, {"train.grad_accum_steps": 2, "model.remat": True}])
def test_the_xla_path_is_counted(change):
    config = tiny_config(
        model={"layers": 3, "width": 128, "heads": 2, "feedforward": 256, "attention": "per_head", "dropout": 0.1},
        span={"limit": 512, "ramp": 32},
        train={"batch_size": 8, "segment": 256},
    ).changed(change)
    _, compiled = dump.compile_step(config, Machine.parse("v5e:2x2"))
    assert compiled is not None
    start, longest = (cycles.count_step(config, compiled, np.full((3, 2), z), chips=4) for z in (0.0, 512.0))
    assert longest.parts()[cycles.BACKWARD].cycles > 5 * start.parts()[cycles.BACKWARD].cycles > 0
    assert longest.parts()[cycles.DENSE] == start.parts()[cycles.DENSE]
