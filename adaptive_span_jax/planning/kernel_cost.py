"""What an attention kernel takes on a TPU at given spans, from its schedule.

A program of the kernel, one for each head of a stream, takes one of two branches and repeats two loops as often as the
span of its head says. What these pieces take is constant, so one schedule gives the cost at any spans.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from adaptive_span_jax.model.attention.fused.sizes import walk
from adaptive_span_jax.planning.bundles import Block, Branch, Count, Loop, ScheduleError, count


@dataclasses.dataclass(frozen=True)
class KernelTurns:
    """What the programs of one head do, by layer and head."""

    short_LH: np.ndarray  # whether they take the branch for short heads
    full_LH: np.ndarray  # turns of the loop over blocks of distances that no mask touches
    masked_LH: np.ndarray  # turns of the loop over the others


def kernel_turns(z_LH: np.ndarray, ramp: int, limit: int) -> KernelTurns:
    """The branch and the turns that the attention kernel takes at these spans."""
    steps_LH, full_LH = walk(z_LH, z_LH, ramp, limit)
    short_LH = full_LH < 0
    # The last step is no turn of a loop.
    return KernelTurns(short_LH, np.where(short_LH, 0, full_LH), np.where(short_LH, 0, steps_LH - 1 - full_LH))


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """What the pieces of an attention kernel take; a program is one head of one stream."""

    programs: int  # of one call
    call: Count  # once a call: around the programs, and what only the first program does
    program: Count  # every program, whatever its branch
    short: Count  # a program of a short head
    fixed: Count  # another program, besides its steps
    full: Count  # one step without a mask
    masked: Count  # one with it

    @classmethod
    def of(cls, schedule: Block) -> "KernelCost":
        """Recognizes the pieces by their structure: a grid loop, two opposite branches, two loops in one of them."""
        call, block = Count(), schedule
        while isinstance(grid := _around_value_loops(block), Branch):
            call += _without(block, [grid])
            block = grid.body
        if grid.turns is None:
            raise ScheduleError("expected a grid loop with constant turns around the kernel's loops")
        call += _without(block, [grid])
        # Down to the block that has the two opposite branches. Some turns of the grid only start or end copies.
        programs, body = float(grid.turns), grid.body
        while (found := _alternatives(body)) is None:
            inner = _around_value_loops(body)
            if isinstance(inner, Loop):
                raise ScheduleError("expected the kernel's loops in one of two opposite branches of a program")
            call += _without(body, [inner]) * programs
            programs *= inner.share
            body = inner.body
        first, second = found
        long, short = (first, second) if _value_loops(first.body) else (second, first)
        loops = _value_loops(long.body)
        if len(loops) != 2 or _value_loops(short.body):
            raise ScheduleError(f"expected two loops in the long branch and none in the short one, found {len(loops)}")
        # What a program does conditionally before the two branches, only the first one does: it starts the copies.
        setup = [part for part in body.parts[: body.parts.index(first)] if isinstance(part, Branch)]
        return cls(
            programs=round(programs),
            call=call + sum((count(part.body) for part in setup), Count()),
            program=_without(body, [first, second, *setup]),
            short=count(short.body),
            fixed=_without(long.body, loops),
            full=count(loops[0].body),
            masked=count(loops[1].body),
        )

    def total(self, turns: KernelTurns, streams: int) -> Count:
        """What one call takes, on average over these layers; a chip's two cores, if it has two, share the streams."""
        layers, heads = turns.short_LH.shape
        if self.programs not in (streams * heads, streams * heads / 2):
            raise ScheduleError(f"the kernel's grid has {self.programs} programs for {streams} streams × {heads} heads")
        times = self.programs / heads / layers
        return (
            self.call
            + self.program * self.programs
            + self.short * (times * turns.short_LH.sum())
            + self.fixed * (times * (~turns.short_LH).sum())
            + self.full * (times * turns.full_LH.sum())
            + self.masked * (times * turns.masked_LH.sum())
        )


def _value_loops(block: Block) -> list[Loop]:
    """Loops within a block whose turns depend on values."""
    return [loop for loop in block.loops() if loop.turns is None]


def _alternatives(block: Block) -> tuple[Branch, Branch] | None:
    """Two opposite branches of a block, one of them with loops whose turns depend on values."""
    branches = [part for part in block.parts if isinstance(part, Branch)]
    for first, second in itertools.pairwise(branches):
        if first.excludes(second) and (_value_loops(first.body) or _value_loops(second.body)):
            return first, second
    return None


def _around_value_loops(block: Block) -> Loop | Branch:
    """The part of a block that has the loops whose turns depend on values."""
    found = [part for part in block.parts if _value_loops(Block(Count(), (part,), ()))]
    if len(found) != 1:
        raise ScheduleError(f"expected the kernel's loops in one place, found them in {len(found)}")
    return found[0]


def _without(block: Block, parts: Sequence[Loop | Branch]) -> Count:
    """What a block takes besides some parts of it, at any depth."""
    return count(_emptied(block, parts))


def _emptied(block: Block, parts: Sequence[Loop | Branch]) -> Block:
    kept = (part for part in block.parts if not any(part is each for each in parts))
    return dataclasses.replace(
        block, parts=tuple(dataclasses.replace(part, body=_emptied(part.body, parts)) for part in kept)
    )
