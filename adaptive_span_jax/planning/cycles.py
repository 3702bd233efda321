"""Cycles of a training step on a TPU that is not here, from the compiler's own final schedule.

Counted: every bundle that a chip issues, a cycle each, with loops multiplied out. Layers are scans with constant turns,
several of them if `model.sandwich` is set. What depends on the spans follows from those of a scan's own layers: the
turns of the XLA path's far loops (model/flops.py), and the branches and turns of the attention kernel (kernel_cost.py);
kernels for persistent vectors do the same at any span. An operation takes no less than its products take the MXUs. Not
counted: waiting for HBM or for other chips; the traffic is counted beside the cycles. What limits an operation is HBM
if its traffic takes longer than its schedule, else the unit that is busy for most of its cycles.
"""

import dataclasses
import operator
from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import flops, transformer
from adaptive_span_jax.model.attention.fused.sizes import BLOCK
from adaptive_span_jax.model.attention.inputs import NEAR, FarShape
from adaptive_span_jax.model.memory import WRITE_SCOPE
from adaptive_span_jax.model.span import reach
from adaptive_span_jax.planning import hlo
from adaptive_span_jax.planning.bundles import UNITS, Block, Count, ScheduleError, count
from adaptive_span_jax.planning.dump import Dump
from adaptive_span_jax.planning.kernel_cost import KernelCost, KernelTurns, kernel_turns
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

# How the program's text names what is counted.
_BACKWARD_SCOPE, _ATTENTION_SCOPE = "transpose(", "shard_map"
_COLLECTIVE_OPCODES = ("all-", "reduce-scatter", "collective-")
MXU, HBM = "MXU", "HBM"  # limits besides UNITS
_FORWARD_KERNELS, _BACKWARD_KERNELS = ("span_forward", "span_fwd"), ("span_backward", "span_bwd")
_PERSISTENT_KERNELS = {"persistent_forward": FORWARD, "persistent_backward": BACKWARD}


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a part of the step takes of one chip."""

    cycles: float = 0
    mxu_cycles: float = 0  # in which all MXUs would have to work
    hbm_bytes: float = 0  # read and written
    units: tuple[float, ...] = (0.0,) * len(UNITS)  # cycles in which all slots of a unit would have to work

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.cycles + other.cycles,
            self.mxu_cycles + other.mxu_cycles,
            self.hbm_bytes + other.hbm_bytes,
            tuple(map(operator.add, self.units, other.units)),
        )

    @property
    def mxu_share(self) -> float:
        """The share of the MXUs' limit that is reached."""
        return self.mxu_cycles / self.cycles if self.cycles else 0.0

    def hbm_cycles(self, chip: Chip) -> float:
        """Cycles that moving the bytes takes at the chip's bandwidth."""
        return self.hbm_bytes * clock(chip) / chip.bandwidth

    def with_hbm(self, chip: Chip) -> float:
        """Cycles if it takes as long as its schedule or its traffic, whichever is longer."""
        return max(self.cycles, self.hbm_cycles(chip))

    def limit(self, chip: Chip) -> tuple[str, float]:
        """(HBM or the busiest unit, the share of the time in which it is busy)."""
        busy = {MXU: self.mxu_cycles, **dict(zip(UNITS, self.units, strict=True)), HBM: self.hbm_cycles(chip)}
        name = max(busy, key=lambda unit: busy[unit])
        return name, busy[name] / self.with_hbm(chip)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the program; an empty schedule is that of a copy that runs beside other operations."""

    name: str
    part: str
    runs: float  # in one step
    cost: Cost  # of all runs
    assumed: bool = False  # whether loops whose turns are not known were counted as one turn
    scope: str = ""  # where in the traced program it comes from

    @classmethod
    def of(cls, name: str, part: str, runs: float, counted: Count, hbm_bytes: float, scope: str = "") -> "Operation":
        """An operation from what one run takes: its bundles, but no less than its products take the MXUs."""
        mxu_cycles, units = counted.rows / _ROWS_PER_CYCLE, (counted * runs).units
        cost = Cost(runs * max(counted.cycles, mxu_cycles), runs * mxu_cycles, runs * hbm_bytes, units)
        return cls(name, part, runs, cost, bool(counted.unknown), scope)


@dataclasses.dataclass(frozen=True)
class StepCount:
    """A training step on one chip."""

    operations: list[Operation]

    @property
    def total(self) -> Cost:
        """The whole step."""
        return _sum(self.operations)

    def parts(self) -> dict[str, Cost]:
        """The step by parts."""
        return {part: _sum(each for each in self.operations if each.part == part) for part in PARTS}

    def most_expensive(self, chip: Chip, number: int) -> list[Operation]:
        """The operations that take longest, HBM included, the first the longest."""
        scheduled = (each for each in self.operations if each.cost.cycles)
        return sorted(scheduled, key=lambda operation: -operation.cost.with_hbm(chip))[:number]

    def limits(self, chip: Chip) -> dict[str, float]:
        """Cycles of the operations that each unit, or HBM, limits; the most first."""
        total: dict[str, float] = {}
        for cost in (each.cost for each in self.operations if each.cost.cycles):
            unit, _ = cost.limit(chip)
            total[unit] = total.get(unit, 0.0) + cost.with_hbm(chip)
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def assumed(self) -> Cost:
        """What operations take in which some loops were counted as one turn."""
        return _sum(each for each in self.operations if each.assumed)

    def with_hbm(self, chip: Chip) -> float:
        """Cycles of the step if each operation takes as long as its schedule or its traffic, whichever is longer."""
        return max(sum(self.limits(chip).values()), self.total.hbm_cycles(chip))

    def seconds(self, chip: Chip) -> float:
        """What a step takes, HBM included."""
        return self.with_hbm(chip) / clock(chip)


def clock(chip: Chip) -> float:
    """Cycles per second: the published peak over what the MXUs take on in a cycle."""
    return chip.bfloat16_flops / (2 * _MULTIPLY_ADDS[chip.name])


def count_step(config: Config, dump: Dump, z_LH: np.ndarray, chips: int) -> StepCount:
    """The cycles of one chip's training step at these spans."""
    return StepCount(list(_Counter(config, dump, z_LH, chips).operations()))


def kernels(dump: Dump) -> dict[str, KernelCost]:
    """The pieces of the program's kernels for attention to the context, by name; none on the XLA path."""
    names = (
        instruction.name
        for computation in dump.program.computations.values()
        for instruction in computation.values()
        if hlo.KERNEL in instruction.attributes and not _persistent_part(instruction)
    )
    return {name: KernelCost.of(dump.schedules[name]) for name in names}


def _persistent_part(instruction: hlo.Instruction) -> str | None:
    """The part of the step that a kernel for persistent vectors belongs to; its turns depend on no spans."""
    return _PERSISTENT_KERNELS.get(instruction.name.split(".")[0]) if hlo.KERNEL in instruction.attributes else None


def _sum(operations: Iterable[Operation]) -> Cost:
    return sum((operation.cost for operation in operations), Cost())


@dataclasses.dataclass(frozen=True)
class _Place:
    """A computation of the program: how often it runs in a step, and where."""

    computation: str
    runs: float
    turns: range | None = None  # in a scan over layers: the scan's
    far: str | None = None  # in the far loops: the part of the step they belong to


class _Counter:
    """Walks the program from its entry."""

    def __init__(self, config: Config, dump: Dump, z_LH: np.ndarray, chips: int):
        self._config = config
        self._streams = config.train.batch_size // chips // config.train.grad_accum_steps
        self._program, self._schedules = dump.program, dump.schedules
        self._z_LH = z_LH
        self._control = dict(_control(dump.control))

    def operations(self) -> Iterator[Operation]:
        """All operations of the program."""
        return self._walk(_Place(self._program.entry, 1.0))

    def _walk(self, place: _Place) -> Iterator[Operation]:
        for instruction in self._program.computations[place.computation].values():
            if instruction.opcode == "while":
                for inner in self._loop(instruction, place):
                    yield from self._walk(inner)
            elif instruction.opcode in ("call", "conditional") or instruction.opcode.startswith("async-"):
                raise ScheduleError(f"{instruction.name}: {instruction.opcode} instructions are not understood")
            elif instruction.name in self._schedules:
                yield self._operation(instruction, place)
            elif instruction.opcode == "fusion" or hlo.KERNEL in instruction.attributes:
                raise ScheduleError(f"{instruction.name}: the compiler wrote down no schedule of it")
            elif instruction.opcode in hlo.PREFETCH:
                part = place.far or (LAYERS if self._turns(instruction, place) else OUTSIDE)
                moved = self._program.traffic(instruction, place.computation)
                yield Operation.of(instruction.name, part, place.runs, Count(), moved)
        yield from self._between(place)

    def _between(self, place: _Place) -> Iterator[Operation]:
        """The scalar code between the operations of a computation."""
        names = self._program.computations[place.computation]
        blocks = {id(block): block for name in names if (block := self._control.get(name))}
        counted = sum((block.own for block in blocks.values()), Count())
        if counted.cycles:
            yield Operation.of(f"between operations of {place.computation}", CONTROL, place.runs, counted, 0)

    def _loop(self, loop: hlo.Instruction, place: _Place) -> Iterator[_Place]:
        """What a loop repeats: its body, or if that has the far loops of a layer in it, all of theirs."""
        if place.far:
            return  # comes with the outermost
        repeats, body = self._program.turns(loop), self._program.body(loop)
        if repeats is None and WRITE_SCOPE in loop.scope:
            repeats = 1  # the mirror of the ring is written only once in a while
        if repeats is None:
            turns = self._turns(loop, place)
            if turns is None:
                raise ScheduleError(f"{loop.name}: its turns depend on values, and it is not a loop over far heads")
            far_turns = _FarTurns.of(self._config, self._spans(turns))
            far = BACKWARD if _BACKWARD_SCOPE in loop.scope else FORWARD
            yield from self._far_places(loop, far_turns, _Place(body, place.runs * far_turns.heads, turns, far))
        else:
            turns = place.turns or transformer.turns_in_scope(self._config, loop.scope)
            # A scan of one turn is no loop; what is in it may be.
            if turns and not place.turns and len(turns) not in (1, repeats):
                raise ScheduleError(f"{loop.name}: {repeats} turns over {len(turns)} layers")
            yield _Place(body, place.runs * repeats, turns)

    def _turns(self, instruction: hlo.Instruction, place: _Place) -> range | None:
        """The turns of the scan that an instruction is in; where it is in no loop, of one that has a single turn."""
        found = place.turns or transformer.turns_in_scope(self._config, instruction.scope)
        return found if place.turns or (found and len(found) == 1) else None

    def _spans(self, turns: range) -> np.ndarray:
        """The spans of the layers of a scan."""
        return self._z_LH[turns.start : turns.stop]

    def _far_places(self, loop: hlo.Instruction, far: "_FarTurns", heads: _Place) -> Iterator[_Place]:
        """The bodies of the loops over heads, in it over memory and segment, and in each of them over queries."""
        blocks = list(self._program.loops(heads.computation))
        tiles = [list(self._program.loops(self._program.body(each))) for each in blocks]
        known = [self._program.turns(each) for each in blocks]
        if known != [None, far.segment_blocks] or [len(each) for each in tiles] != [1, 1]:
            raise ScheduleError(f"{loop.name}: not the loops of attention/far.py")
        for block, [tile], block_turns, tile_turns in zip(
            blocks,
            tiles,
            (far.memory_blocks, far.segment_blocks),
            (far.memory_tiles, far.segment_tiles),
            strict=True,
        ):
            for each, turns in ((block, block_turns), (tile, tile_turns)):
                yield dataclasses.replace(heads, computation=self._program.body(each), runs=heads.runs * turns)
        yield heads

    def _operation(self, instruction: hlo.Instruction, place: _Place) -> Operation:
        name, schedule = instruction.name, self._schedules[instruction.name]
        moved = self._program.traffic(instruction, place.computation)
        if part := _persistent_part(instruction):
            counted = count(schedule)
            if counted.unknown:
                raise ScheduleError(f"{name}: expected loops with constant turns")
            return Operation.of(name, part, place.runs, counted, moved, instruction.scope)
        turns = self._turns(instruction, place)
        if hlo.KERNEL in instruction.attributes:
            part = FORWARD if any(kind in name for kind in _FORWARD_KERNELS) else BACKWARD
            if part == BACKWARD and not any(kind in name for kind in _BACKWARD_KERNELS):
                raise ScheduleError(f"{name}: an unknown kernel")
            if turns is None:
                raise ScheduleError(f"{name}: a kernel outside of the layers")
            of_heads = kernel_turns(self._spans(turns), self._config.span.ramp, self._config.span.limit)
            try:
                counted = KernelCost.of(schedule).total(of_heads, self._streams)
            except ScheduleError as error:
                raise ScheduleError(f"{name}: {error}") from error
            moved += self._memory_difference(instruction, place, of_heads)
            return Operation.of(name, part, place.runs, counted, moved, instruction.scope)
        counted = count(schedule)
        if instruction.opcode.startswith(_COLLECTIVE_OPCODES):
            part = COLLECTIVES
        elif place.far or (turns and _ATTENTION_SCOPE in instruction.scope):
            part = place.far or (BACKWARD if _BACKWARD_SCOPE in instruction.scope else FORWARD)
        elif counted.rows:
            part = DENSE
        else:
            part = LAYERS if turns else OUTSIDE
        return Operation.of(name, part, place.runs, counted, moved, instruction.scope)

    def _memory_difference(self, kernel: hlo.Instruction, place: _Place, turns: KernelTurns) -> float:
        """Bytes of the memory blocks that a kernel reads, less those of the whole memory: its largest operand."""
        operands = (self._program.computations[place.computation][each] for each in kernel.operands)
        memory = max((array for operand in operands for array in operand.arrays), key=lambda array: array.hbm)
        blocks = self._streams * (turns.full_LH + turns.masked_LH).sum() / len(turns.full_LH)
        return blocks * BLOCK * self._config.model.width * memory.element - memory.hbm


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
        far = FarShape.on("tpu")
        of_far = flops.far_tiles(config, jnp.asarray(z_LH, jnp.float32), far)
        rows_X, tiles_LHX = (np.asarray(array) for array in of_far)
        size = far.keys(config.span.limit)
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
