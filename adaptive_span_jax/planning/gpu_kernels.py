"""How long a training step may take on GPUs, counted kernel by kernel from the compiled program.

Counted: the kernels of the optimized HLO with their products and bytes, how often each runs (turns of the far loops
follow from the spans), and how often the host must read whether a loop goes on. Assumed: a kernel takes the longer of

    arithmetic   2 · multiply-adds / (peak · ARITHMETIC_SHARE)
    traffic      bytes / (bandwidth · BANDWIDTH_SHARE)

and LAUNCH_SECONDS; a condition that depends on values takes CONDITION_SECONDS. Left out: waiting for other GPUs.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import flops, transformer
from adaptive_span_jax.model.attention.inputs import FarShape
from adaptive_span_jax.model.memory import WRITE_SCOPE
from adaptive_span_jax.planning import hlo
from adaptive_span_jax.planning.bundles import ScheduleError
from adaptive_span_jax.planning.topology import Chip

# None of this was measured: the shares of the peaks that kernels reach, what a kernel takes besides its work, and what
# reading a loop's condition back takes.
ARITHMETIC_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
LAUNCH_SECONDS = 1.5e-6
CONDITION_SECONDS = 15e-6

# Instructions that start no kernel: they name arrays otherwise, or end what another has started.
_NO_KERNEL = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "after-all", "while")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# XLA's own products, and those of NVIDIA's library.
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{([\d,]*)\}|ensions":\[([\d,"]*)\])')
_LIBRARY = 'custom_call_target="__cublas'
_TYPE = re.compile(r"(\w+)\[([\d,]*)\]")


# Where kernels run: outside of the layers, in a layer at any span, or in the loops whose turns follow from the spans.
OUTSIDE, LAYERS, FAR_LOOPS = "outside", "layers", "far loops"

# What a step's time goes to.
ARITHMETIC, BANDWIDTH, LAUNCHES, CONDITIONS = "arithmetic", "bandwidth", "launches", "conditions"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of the program, and how often a step runs it."""

    name: str
    runs: float
    multiply_adds: int  # of one run, like what follows
    half: bool  # its products are of 16-bit numbers
    moved: int  # bytes
    place: str = OUTSIDE
    scope: str = ""  # where in the traced program it comes from

    def parts(self, chip: Chip) -> dict[str, float]:
        """Seconds that all runs may take of arithmetic, of bandwidth (beside each other), and of launches."""
        peak = chip.bfloat16_flops if self.half else chip.float32_flops
        return {
            ARITHMETIC: self.runs * 2 * self.multiply_adds / (peak * ARITHMETIC_SHARE),
            BANDWIDTH: self.runs * self.moved / (chip.bandwidth * BANDWIDTH_SHARE),
            LAUNCHES: self.runs * LAUNCH_SECONDS,
        }

    def seconds(self, chip: Chip) -> float:
        """What all of its runs may take."""
        parts = self.parts(chip)
        return max(parts[ARITHMETIC], parts[BANDWIDTH]) + parts[LAUNCHES]

    def limit(self, chip: Chip) -> str:
        """What takes the most of its time."""
        parts = self.parts(chip)
        return max(parts, key=lambda part: parts[part])


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step on one GPU at given spans."""

    kernels: tuple[Kernel, ...]
    turns: float  # of loops whose turns depend on the spans
    conditions: float  # read back by the host: one a turn, and one to end each loop

    @property
    def launches(self) -> float:
        """How many kernels run."""
        return sum(kernel.runs for kernel in self.kernels)

    def launches_in(self, place: str) -> float:
        """How many kernels run in a place."""
        return sum(kernel.runs for kernel in self.kernels if kernel.place == place)

    def limits(self, chip: Chip) -> dict[str, float]:
        """What the step's seconds go to, the most first; a kernel's work to arithmetic or bandwidth."""
        total = dict.fromkeys((ARITHMETIC, BANDWIDTH, LAUNCHES), 0.0)
        for kernel in self.kernels:
            parts = kernel.parts(chip)
            work = ARITHMETIC if parts[ARITHMETIC] > parts[BANDWIDTH] else BANDWIDTH
            total[work] += parts[work]
            total[LAUNCHES] += parts[LAUNCHES]
        total[CONDITIONS] = self.conditions * CONDITION_SECONDS
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def seconds(self, chip: Chip) -> float:
        """What a step may take."""
        return sum(self.limits(chip).values())

    def most_expensive(self, chip: Chip, count: int) -> list[Kernel]:
        """The kernels that take longest in a step."""
        return sorted(self.kernels, key=lambda kernel: -kernel.seconds(chip))[:count]


def count_step(config: Config, program: hlo.Program, z_LH: np.ndarray) -> Step:
    """What a step runs at these spans."""
    counter = _Counter(config, program, z_LH)
    kernels = tuple(counter.kernels(program.entry, 1.0, OUTSIDE))
    return Step(kernels, counter.turns, counter.conditions)


class _Turns(NamedTuple):
    """How often a loop turns whose turns depend on the spans, and in each turn the loops in it; averages."""

    turns: float
    below: tuple["_Turns", ...] = ()


def _far_turns(config: Config, z_LH: np.ndarray) -> _Turns:
    """The turns of the loops in attention/far.py in a layer: over heads, in it over blocks, in these over tiles."""
    limit, shape = config.span.limit, FarShape.on("gpu")
    tiles_LHX = np.asarray(flops.far_tiles(config, jnp.asarray(z_LH, jnp.float32), shape)[1])
    in_memory = -(-limit // shape.keys(limit))
    sizes = shape.groups(tiles_LHX.shape[1])
    heads = (tiles_LHX[:, :: sizes[0]] > 0).any(axis=2).sum()
    below = []
    for size, smaller in zip(sizes, (*sizes[1:], 0), strict=True):
        # What the group reads, less what larger groups have read.
        of_group_LHX = tiles_LHX[:, smaller :: sizes[0]]
        if size < sizes[0]:
            of_group_LHX = np.where(tiles_LHX[:, size :: sizes[0]] > 0, 0, of_group_LHX)
        for tiles in (of_group_LHX[..., :in_memory], of_group_LHX[..., in_memory:]):
            if tiles.shape[-1]:
                blocks = (tiles > 0).sum()
                # Without any, none of the averages matters.
                below.append(_Turns(blocks / max(heads, 1), (_Turns(tiles.sum() / max(blocks, 1)),)))
    return _Turns(heads / len(z_LH), tuple(below))


class _Counter:
    """Walks through a program from its entry; `turns` and `conditions` add up as it does."""

    def __init__(self, config: Config, program: hlo.Program, z_LH: np.ndarray) -> None:
        self._config, self._program, self._z_LH = config, program, z_LH
        self.turns = self.conditions = 0.0

    def kernels(self, computation: str, runs: float, place: str, below: tuple["_Turns", ...] = ()) -> Iterator[Kernel]:
        """The kernels of a computation that runs so often, and of the loops in it.

        In the far loops, `below` has those in the computation whose turns depend on values, in order.
        """
        waiting = collections.deque(below)
        for instruction in self._program.computations[computation].values():
            if instruction.opcode == "while":
                yield from self._loop(instruction, runs, place, waiting)
            elif instruction.opcode in ("conditional", "call", "async-start"):
                raise ScheduleError(f"{instruction.name}: kernels in a {instruction.opcode} are not counted yet")
            elif instruction.opcode not in _NO_KERNEL and not instruction.opcode.endswith("-done"):
                multiply_adds, half = self._products(instruction, computation)
                moved = self._moved(instruction, computation)
                yield Kernel(instruction.name, runs, multiply_adds, half, moved, place, instruction.scope)

    def _loop(
        self, loop: hlo.Instruction, runs: float, place: str, waiting: collections.deque["_Turns"]
    ) -> Iterator[Kernel]:
        body, known = self._program.body(loop), _TRIP_COUNT.search(loop.attributes)
        if known:  # layers
            in_layers = place == OUTSIDE and transformer.turns_in_scope(self._config, loop.scope) is not None
            yield from self.kernels(body, runs * int(known[1]), LAYERS if in_layers else place)
            return
        if WRITE_SCOPE in loop.scope:  # the mirror of the ring is written only once in a while
            self.conditions += 2 * runs
            yield from self.kernels(body, runs, place)
            return
        if place == FAR_LOOPS and not waiting:
            raise ScheduleError(f"{loop.name}: its turns depend on values, and it is none of the far loops")
        far = waiting.popleft() if place == FAR_LOOPS else self._far_turns(loop)
        self.turns += runs * far.turns
        self.conditions += runs * (far.turns + 1)
        yield from self.kernels(body, runs * far.turns, FAR_LOOPS, far.below)

    def _far_turns(self, loop: hlo.Instruction) -> "_Turns":
        """The turns of far loops, by the spans of the layers of the scan that they are in."""
        scanned = transformer.turns_in_scope(self._config, loop.scope)
        if scanned is None:
            raise ScheduleError(f"{loop.name}: its turns depend on values, and it is in no layer")
        return _far_turns(self._config, self._z_LH[scanned.start : scanned.stop])

    def _moved(self, instruction: hlo.Instruction, computation: str) -> int:
        """Bytes that one run of an instruction moves."""
        if _LIBRARY not in instruction.attributes:
            return self._program.traffic(instruction, computation)
        operands = (self._program.computations[computation][name] for name in instruction.operands)
        product, *_ = instruction.arrays  # the others are its working space
        return sum(operand.arrays[0].size for operand in operands) + product.size

    def _products(self, instruction: hlo.Instruction, computation: str) -> tuple[int, bool]:
        """(multiply-adds of an instruction's products, whether their inputs are 16-bit numbers)."""
        if instruction.opcode == "dot" or _LIBRARY in instruction.attributes:
            left = self._program.computations[computation][instruction.operands[0]]
            (kind, sizes), contracted = _dimensions(left.result), _CONTRACTED.search(instruction.attributes)
            axes = re.findall(r"\d+", contracted[0]) if contracted else []
            length = math.prod(sizes[int(axis)] for axis in axes)
            return math.prod(_dimensions(instruction.result)[1]) * length, kind in ("bf16", "f16")
        if instruction.opcode == "custom-call":
            raise ScheduleError(f"{instruction.name}: it is not known what this kernel of a library does")
        called = instruction.attribute("calls")
        if called is None:
            return 0, False
        found = [self._products(each, called) for each in self._program.computations[called].values()]
        return sum(count for count, _ in found), any(half for count, half in found if count)


def _dimensions(result: str) -> tuple[str, list[int]]:
    """The element type and the sizes of an array, e.g. `bf16[8,512]{1,0}`, or of the first in a tuple."""
    found = _TYPE.search(result)
    if found is None:
        raise ScheduleError(f"{result[:80]} is no array")
    return found[1], [int(size) for size in found[2].split(",") if size]
