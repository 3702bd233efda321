"""Hand-made schedules: their loops, branches, products and units."""

import pytest

from adaptive_span_jax.planning import bundles
from adaptive_span_jax.planning.bundles import ScheduleError
from tests.support.schedules import AROUND, listing, loop, skip


def count(*contents: str) -> bundles.Count:
    return bundles.count(bundles.parse(listing(*contents)))


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


CAPACITIES = """== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
"""


def test_units_are_counted_with_the_loops_around_them():
    text = listing("%1 = vld", *loop(10, "%2 = vadd", turns=5))
    lines = ["0 0 0 0 0 3 0 0 0 0"] + ["0 3 2 0 0 0 0 1 0 1"] * (AROUND + 1)
    found = bundles.count(bundles.parse(text, CAPACITIES + "\n".join(lines)))
    inside = 5 * (AROUND + 1)
    expected = {"XLU": inside, "VALU": inside / 2, "EUP": 0, "VLOAD": 1, "VSTORE": inside, "SALU": inside / 2}
    assert dict(zip(bundles.UNITS, found.units, strict=True)) == pytest.approx(expected)
    assert found.cycles == 1 + inside
    for other in (CAPACITIES + lines[0], CAPACITIES.replace("VSTORE,", "VSTORES,") + "\n".join(lines), "nothing"):
        with pytest.raises(ScheduleError, match="in another form"):
            bundles.parse(text, other)


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
