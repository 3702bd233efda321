"""Cycles of a training step on a TPU that is not here, from the compiler's own final schedule.

Counted: every bundle that a chip issues, a cycle each, with loops multiplied out. Layers are loops with constant turns.
What depends on the spans follows from them: the turns of the XLA path's far loops (model/flops.py), and the branches
and turns of the attention kernel (`kernel_turns`). Not counted: waiting for HBM, for other chips, or for an MXU.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import flops
from adaptive_span_jax.model.attention.inputs import FAR, NEAR
from adaptive_span_jax.model.span import reach
from adaptive_span_jax.planning import hlo
from adaptive_span_jax.planning.bundles import Block, Branch, Count, Loop, ScheduleError, count
from adaptive_span_jax.planning.dump import Dump
from adaptive_span_jax.planning.topology import Chip

# Multiply-adds that a chip's MXUs take on in a cycle: 4 MXUs of 128 × 128 (v5e; v5p has two such cores, between which
# the compiler shares out operations), 2 of 256 × 256 that take two rows a cycle (v6e). With the published peak FLOP/s
# these give clocks of 1.5, 1.75 and 1.75 GHz.
_MULTIPLY_ADDS = {"TPU v5e": 4 * 128**2, "TPU v5p": 2 * 4 * 128**2, "TPU v6e": 2 * 2 * 256**2}
# Rows that the MXUs of one core take on in a cycle.
_ROWS_PER_CYCLE = 4

# Parts of a step, in the order in which they are shown.
DENSE, FORWARD, BACKWARD = "dense products", "attention forward", "attention backward"
LAYERS, OUTSIDE, COLLECTIVES, CONTROL = "rest of the layers", "optimizer and rest", "collectives", "program control"
PARTS = (DENSE, FORWARD, BACKWARD, LAYERS, OUTSIDE, COLLECTIVES, CONTROL)

# The kernel walks distances in blocks of this many; heads that reach no further than _SHORT take a branch of their own.
_BLOCK, _SHORT = 128, 64
_KERNEL = "tpu_custom_call"
_FORWARD_KERNELS, _BACKWARD_KERNELS = ("span_forward", "span_fwd"), ("span_backward", "span_bwd")
# Turns of a grid loop beyond its programs: copies for the first program start before it, those of the last end after.
_MOST_PIPELINE_TURNS = 4


@dataclasses.dataclass(frozen=True)
class KernelTurns:
    """What the programs of one head do, by layer and head."""

    short_LH: np.ndarray  # whether they take the branch for short heads
    full_LH: np.ndarray  # turns of the loop over blocks of distances that no mask touches
    masked_LH: np.ndarray  # turns of the loop over the others


def kernel_turns(z_LH: np.ndarray, ramp: int, limit: int) -> KernelTurns:
    """The branch and the turns that the attention kernel takes at these spans."""
    reach_LH = reach(np.asarray(z_LH, np.float64), ramp, limit)
    steps_LH = -(-reach_LH // _BLOCK)
    full_LH = np.minimum(np.minimum(np.ceil(z_LH), limit).astype(int) // _BLOCK, steps_LH)
    short_LH = reach_LH <= _SHORT
    return KernelTurns(short_LH, np.where(short_LH, 0, full_LH), np.where(short_LH, 0, steps_LH - full_LH))


@dataclasses.dataclass(frozen=True)
class KernelCost:
    """What the pieces of an attention kernel take; a program is one head of one stream."""

    call: Count  # once a call: before and after the grid, and what only the first program does
    turn: Count  # every turn of the grid
    turns: int  # of the grid
    program: Count  # every program, whatever its branch
    short: Count  # a program of a short head
    fixed: Count  # another program, besides its steps
    full: Count  # one step without a mask
    masked: Count  # one with it

    @classmethod
    def of(cls, schedule: Block) -> "KernelCost":
        """Recognizes the pieces by their structure: a grid loop, two opposite branches, two loops in one of them."""
        grids = [part for part in schedule.parts if isinstance(part, Loop) and _value_loops(part.body)]
        if len(grids) != 1 or grids[0].turns is None:
            raise ScheduleError(
                f"expected one grid loop with constant turns around the kernel's loops, found {len(grids)}"
            )
        [grid] = grids
        turn, body = Count(), grid.body
        # The grid's own bundles, down to the block that has the two opposite branches.
        while (found := _alternatives(body)) is None:
            inner = [part for part in body.parts if _value_loops(part.body)]
            if len(inner) != 1 or not isinstance(inner[0], Branch):
                raise ScheduleError("expected the kernel's loops in one of two opposite branches of a program")
            turn += _without(body, inner)
            body = inner[0].body
        first, second = found
        long, short = (first, second) if _value_loops(first.body) else (second, first)
        loops = _value_loops(long.body)
        if len(loops) != 2 or _value_loops(short.body):
            raise ScheduleError(f"expected two loops in the long branch and none in the short one, found {len(loops)}")
        # Before the two branches, only the first program does something conditionally: it starts the copies.
        start = body.parts.index(first)
        setup = [part for part in body.parts[:start] if isinstance(part, Branch)]
        return cls(
            call=_without(schedule, [grid]) + sum((count(part.body) for part in setup), Count()),
            turn=turn,
            turns=grid.turns,
            program=_without(body, [first, second, *setup]),
            short=count(short.body),
            fixed=_without(long.body, loops),
            full=count(loops[0].body),
            masked=count(loops[1].body),
        )

    def total(self, turns: KernelTurns, streams: int) -> Count:
        """What one call takes, on average over the layers."""
        layers, heads = turns.short_LH.shape
        if not 0 <= self.turns - streams * heads <= _MOST_PIPELINE_TURNS:
            raise ScheduleError(f"the kernel's grid has {self.turns} turns for {streams} streams × {heads} heads")
        programs = streams / layers
        return (
            self.call
            + self.turn * self.turns
            + self.program * (programs * turns.short_LH.size)
            + self.short * (programs * turns.short_LH.sum())
            + self.fixed * (programs * (~turns.short_LH).sum())
            + self.full * (programs * turns.full_LH.sum())
            + self.masked * (programs * turns.masked_LH.sum())
        )


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the program and what it takes in one step."""

    name: str
    part: str
    runs: float
    count: Count  # of all runs


@dataclasses.dataclass(frozen=True)
class StepCount:
    """A training step on one chip."""

    operations: list[Operation]

    @property
    def total(self) -> Count:
        """The whole step."""
        return sum((operation.count for operation in self.operations), Count())

    def parts(self) -> dict[str, Count]:
        """The step by parts."""
        return {part: sum((each.count for each in self.operations if each.part == part), Count()) for part in PARTS}

    def most_expensive(self, number: int) -> list[Operation]:
        """The operations that take the most cycles, the first the most."""
        return sorted(self.operations, key=lambda operation: -operation.count.cycles)[:number]

    def assumed(self) -> list[Operation]:
        """Operations in which loops whose turns are not known were counted as one turn."""
        return [each for each in self.operations if each.count.unknown]


def clock(chip: Chip) -> float:
    """Cycles per second: the published peak over what the MXUs take on in a cycle."""
    return chip.bfloat16_flops / (2 * _MULTIPLY_ADDS[chip.name])


def mxu_share(counted: Count) -> float:
    """The share of the cycles for which the MXUs have work."""
    return counted.rows / _ROWS_PER_CYCLE / counted.cycles if counted.cycles else 0.0


def count_step(config: Config, dump: Dump, z_LH: np.ndarray, chips: int) -> StepCount:
    """The cycles of one chip's training step at these spans."""
    return StepCount(list(_Counter(config, dump, z_LH, chips).operations()))


class _Counter:
    """Walks the program from its entry; `runs` is how often the computation at hand is run in a step."""

    def __init__(self, config: Config, dump: Dump, z_LH: np.ndarray, chips: int):
        self._layers = config.model.layers
        self._streams = config.train.batch_size // chips // config.train.grad_accum_steps
        self._program, self._schedules = dump.program, dump.schedules
        self._far = _FarTurns.of(config, z_LH)
        self._kernel = kernel_turns(z_LH, config.span.ramp, config.span.limit)
        self._control = dict(_control(dump.control))

    def operations(self) -> Iterator[Operation]:
        """All operations of the program."""
        return self._walk(self._program.entry, 1.0, in_layer=False)

    def _walk(self, computation: str, runs: float, *, in_layer: bool) -> Iterator[Operation]:
        instructions = self._program.computations[computation]
        for instruction in instructions.values():
            if instruction.opcode == "while":
                yield from self._loop(instruction, runs, in_layer=in_layer)
            elif instruction.opcode in ("call", "conditional"):
                raise ScheduleError(f"{instruction.name}: {instruction.opcode} instructions are not understood")
            elif instruction.name in self._schedules:
                yield self._operation(instruction, runs, in_layer=in_layer)
        yield from self._between(computation, runs)

    def _between(self, computation: str, runs: float) -> Iterator[Operation]:
        """The scalar code between the operations of a computation."""
        found = {self._control[name] for name in self._program.computations[computation] if name in self._control}
        if found:
            counts = sum((Count(each.own.cycles) for each in found), Count())
            yield Operation(f"between operations of {computation}", CONTROL, runs, counts * runs)

    def _loop(self, loop: hlo.Instruction, runs: float, *, in_layer: bool) -> Iterator[Operation]:
        turns, body = self._program.turns(loop), self._program.body(loop)
        if turns is not None:
            yield from self._walk(body, runs * turns, in_layer=in_layer or turns == self._layers)
            return
        if not in_layer:
            raise ScheduleError(f"the turns of {loop.name} depend on values, and it is not in a layer")
        # The far loops: over heads, in it over memory and over the segment, in each of them over queries.
        inner = list(self._program.loops(body))
        tiles = [list(self._program.loops(self._program.body(each))) for each in inner]
        known = [self._program.turns(each) for each in inner]
        if known != [None, self._far.segment_blocks] or [len(each) for each in tiles] != [1, 1]:
            raise ScheduleError(f"{loop.name}: not the loops of attention/far.py")
        part = BACKWARD if "transpose(" in loop.scope else FORWARD
        heads = runs * self._far.heads
        for computation, times in (
            (body, heads),
            (self._program.body(inner[0]), heads * self._far.memory_blocks),
            (self._program.body(inner[1]), heads * self._far.segment_blocks),
            (self._program.body(tiles[0][0]), heads * self._far.memory_tiles),
            (self._program.body(tiles[1][0]), heads * self._far.segment_tiles),
        ):
            for instruction in self._program.computations[computation].values():
                if instruction.name in self._schedules:
                    yield Operation(instruction.name, part, times, count(self._schedules[instruction.name]) * times)
            yield from self._between(computation, times)

    def _operation(self, instruction: hlo.Instruction, runs: float, *, in_layer: bool) -> Operation:
        schedule, scope = self._schedules[instruction.name], instruction.scope
        backward = "transpose(" in scope
        if f'custom_call_target="{_KERNEL}"' in instruction.attributes:
            forward = any(name in instruction.name for name in _FORWARD_KERNELS)
            if not forward and not any(name in instruction.name for name in _BACKWARD_KERNELS):
                raise ScheduleError(f"{instruction.name}: an unknown kernel")
            try:
                counted = KernelCost.of(schedule).total(self._kernel, self._streams)
            except ScheduleError as error:
                raise ScheduleError(f"{instruction.name}: {error}") from error
            return Operation(instruction.name, FORWARD if forward else BACKWARD, runs, counted * runs)
        counted = count(schedule) * runs
        if instruction.opcode.startswith(("all-", "reduce-scatter", "collective-")):
            part = COLLECTIVES
        elif in_layer and "shard_map" in scope:
            part = BACKWARD if backward else FORWARD
        elif counted.rows:
            part = DENSE
        else:
            part = LAYERS if in_layer else OUTSIDE
        return Operation(instruction.name, part, runs, counted)


@dataclasses.dataclass(frozen=True)
class _FarTurns:
    """Turns of the loops in attention/far.py: heads a layer, the others a head, all on average."""

    heads: float
    memory_blocks: float
    memory_tiles: float
    segment_blocks: int
    segment_tiles: float

    @classmethod
    def of(cls, config: Config, z_LH: np.ndarray) -> "_FarTurns":
        rows_X, tiles_LHX = (np.asarray(array) for array in flops.far_tiles(config, jnp.asarray(z_LH, jnp.float32)))
        size = min(FAR, config.span.limit)
        memory = -(-config.span.limit // size)
        reach_LH = reach(np.asarray(z_LH, np.float64), config.span.ramp, config.span.limit)
        far_LH = reach_LH > NEAR
        heads = max(int(far_LH.sum()), 1)  # without any, none of the averages matters
        return cls(
            heads=far_LH.sum() / len(far_LH),
            memory_blocks=np.where(far_LH, -(-reach_LH // size), 0).sum() / heads,
            memory_tiles=tiles_LHX[..., :memory].sum() / heads,
            segment_blocks=len(rows_X) - memory,
            segment_tiles=tiles_LHX[..., memory:].sum() / heads,
        )


def _control(block: Block) -> Iterator[tuple[str, Block]]:
    """For every operation that the program calls, the block of scalar code that calls it."""
    yield from ((name, block) for name in block.calls)
    for part in block.parts:
        yield from _control(part.body)


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


def _without(block: Block, parts: "list[Loop] | list[Branch] | list[Loop | Branch]") -> Count:
    """What a block takes besides some of what is in it, at any depth."""
    kept = [part for part in block.parts if not any(part is each for each in parts)]
    bare = Block(block.own, tuple(dataclasses.replace(part, body=_emptied(part.body, parts)) for part in kept), ())
    return count(bare)


def _emptied(block: Block, parts: "list[Loop] | list[Branch] | list[Loop | Branch]") -> Block:
    """The block without some parts, at any depth."""
    kept = (part for part in block.parts if not any(part is each for each in parts))
    return dataclasses.replace(
        block, parts=tuple(dataclasses.replace(part, body=_emptied(part.body, parts)) for part in kept)
    )
