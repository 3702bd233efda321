"""The pieces of an attention kernel in its schedule, and what they add up to at given spans."""

import numpy as np
import pytest

from adaptive_span_jax.planning import bundles, kernel_cost
from adaptive_span_jax.planning.bundles import ScheduleError
from tests.support.schedules import AROUND, kernel, listing, loop


def test_the_pieces_of_a_kernel_are_found_by_their_structure():
    found = kernel_cost.KernelCost.of(bundles.parse(kernel()))
    jump = 1 + bundles.JUMP_SLOTS
    assert found.programs == 6
    assert found.call.cycles == 2 + 8 * (AROUND + 4 + jump) + 17
    assert found.program.cycles == 4 + 3 * jump
    assert (found.short.cycles, found.fixed.cycles) == (40, 13)
    assert (found.full.cycles, found.masked.cycles) == (100 + AROUND, 200 + AROUND)


def test_a_kernel_takes_the_branches_and_turns_of_its_heads():
    cost = kernel_cost.KernelCost.of(bundles.parse(kernel()))
    turns = kernel_cost.KernelTurns(np.array([[True, False]]), np.array([[0, 3]]), np.array([[0, 2]]))
    once = cost.call.cycles + 6 * cost.program.cycles
    heads = cost.short.cycles + cost.fixed.cycles + 3 * cost.full.cycles + 2 * cost.masked.cycles
    assert cost.total(turns, streams=3).cycles == once + 3 * heads
    # Over layers it is the average.
    idle = kernel_cost.KernelTurns(*(np.concatenate([array, np.zeros_like(array)]) for array in vars(turns).values()))
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
        kernel_cost.KernelCost.of(bundles.parse(text))


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
    found = kernel_cost.kernel_turns(np.array([[z]]), 32, 8192)
    assert (found.short_LH.item(), found.full_LH.item(), found.masked_LH.item()) == expected
