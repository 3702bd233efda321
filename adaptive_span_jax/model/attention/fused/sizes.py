"""What the kernels of one layer are compiled for, and how far each head walks."""

import dataclasses
import math
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from adaptive_span_jax.model.span import reach

Array = TypeVar("Array", jax.Array, np.ndarray)

# Queries, keys and distances come in blocks of this many: the lanes of a vector register.
BLOCK = 128

# Copies of memory blocks under way at a time, a power of two: a step is shorter than the latency of HBM.
AHEAD = 4

# A head that reaches no further has a path of its own, without steps.
SHORT = BLOCK // 2
HALVES = (slice(0, SHORT), slice(SHORT, BLOCK))  # of a query block, each of which then sees 128 keys


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one layer's attention on one device."""

    streams: int
    cores: int  # of a device that has several, each of which takes an equal share of the streams
    segment: int
    heads: int
    head_width: int
    width: int
    limit: int
    ramp: int
    ring: int  # rows of the memory's ring
    dropout: float  # the rate
    per_query: bool  # z differs between queries
    has_valid_length: bool  # positions before the valid part of memory are not attended to
    interpret: bool  # run by the interpreter, on any platform

    @property
    def streams_per_core(self) -> int:
        """Streams that one core handles, one after the other."""
        return self.streams // self.cores

    @property
    def blocks(self) -> int:
        """Query blocks of a segment."""
        return self.segment // BLOCK

    @property
    def pairs(self) -> list[range]:
        """Query blocks by twos. Steps handle them so: the compiler's schedule is shorter than for one after another."""
        blocks = range(self.blocks)
        return [blocks[first : first + 2] for first in blocks[::2]]

    @property
    def distance_blocks(self) -> int:
        """The most steps a head can take."""
        return -(-self.limit // BLOCK)

    @property
    def part(self) -> int:
        """Lanes of a head's keys, and of its values: both share one register where they fit."""
        return BLOCK // 2 if self.head_width <= BLOCK // 2 else BLOCK

    @property
    def rows(self) -> int:
        """Rows of a head's transposed queries, keys and values: whole tiles of bfloat16."""
        return -(-self.head_width // 16) * 16

    @property
    def slots(self) -> int:
        """Projected key blocks that steps hold: one per query block, one behind, three ahead; a power of two."""
        return 1 << (self.blocks + 3).bit_length()

    @property
    def hidden_blocks(self) -> int:
        """Memory blocks that the backward kernel holds: those ahead, and until their gradient is complete."""
        return 1 << (self.blocks + 2 + AHEAD).bit_length()

    @property
    def score_scale(self) -> float:
        """1/√K, and scores are kept in base 2 because the hardware's exponential is."""
        return math.log2(math.e) / math.sqrt(self.head_width)


class Walk(NamedTuple):
    """How many steps each head takes."""

    steps: Any
    full: Any  # how many leading steps need no mask; −1 selects the short path, without steps


def walk(z_min: Array, z_max: Array, ramp: int, limit: int, valid_length: Any = None) -> Walk:
    """The walk of each head, given the extremes of its z over tokens. NumPy or JAX."""
    xp: Any = z_max.__array_namespace__()
    read = reach(z_max, ramp, limit)
    steps = (read + (BLOCK - 1)) // BLOCK
    # Distance z + 1 has mask 1 but is the closed end of the ramp, where the mask has a derivative.
    inside = xp.minimum(xp.ceil(z_min), limit).astype(xp.int32)
    if valid_length is not None:
        inside = xp.minimum(inside, valid_length)
    # The last step also finishes what the steps carry; it always has a mask.
    full = xp.minimum(inside // BLOCK, steps - 1)
    return Walk(steps, xp.where(read <= SHORT, -1, full))
