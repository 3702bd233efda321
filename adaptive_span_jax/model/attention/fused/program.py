"""What programs of both kernels have: a place in the grid, their head's lanes, mask, dropout and memory blocks."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adaptive_span_jax.model import dropout
from adaptive_span_jax.model.attention.fused.sizes import AHEAD, BLOCK, Sizes
from adaptive_span_jax.model.attention.fused.tiles import column, distances, dot, iota
from adaptive_span_jax.model.span import on_ramp, soft_mask

Ref = Any


class Scalars(NamedTuple):
    """Prefetched to scalar memory, before the first program starts."""

    place: Ref  # int32: the layer, the ring's row after the newest, the valid length of memory
    steps_H: Ref  # see sizes.Walk
    full_H: Ref
    z_H: Ref  # float32, where z does not differ between tokens
    word_N: Ref  # uint32: dropout's word with stream and head folded in, N = stream · H + head


class Blocks(NamedTuple):
    """Memory blocks on their way into a program."""

    memory_LBMD: Ref  # in HBM
    hidden_XJD: Ref  # a ring of X blocks in VMEM
    semaphore_X: Ref


def rows(block: int) -> slice:
    """The rows of a query block."""
    return slice(block * BLOCK, (block + 1) * BLOCK)


class Program(abc.ABC):
    """One stream and one head."""

    def __init__(self, sizes: Sizes, scalars: Scalars, weights_DE: Ref, blocks: Blocks, distance: Ref, spread: Ref):
        self.sizes, self.scalars, self.weights_DE, self.blocks = sizes, scalars, weights_DE, blocks
        self.distance, self.spread = distance, spread  # constant tiles, see `first`
        # Read here: not known inside loops and branches.
        self.local_stream, self.head = pl.program_id(1), pl.program_id(2)
        self.stream = pl.program_id(0) * sizes.streams_per_core + self.local_stream
        self.steps, self.full = scalars.steps_H[self.head], scalars.full_H[self.head]

    def run(self) -> None:
        """The whole program."""
        pl.when(self.is_first)(self.first)
        pl.when(self.full < 0)(self.short_head)
        pl.when(self.full >= 0)(self._long_head)

    @abc.abstractmethod
    def short_head(self) -> None:
        """A head of reach 64 or less: each half of a query block sees 128 keys, no matter where its block starts."""

    def _long_head(self) -> None:
        """A head that walks."""
        self.start_copies()
        self.begin()
        lax.fori_loop(0, self.full, lambda step, _: self.step(step, masked=False), None)
        lax.fori_loop(self.full, self.steps - 1, lambda step, _: self.step(step, masked=True), None)
        self.end(self.steps - 1)

    @abc.abstractmethod
    def begin(self) -> None:
        """What comes before the first step."""

    @abc.abstractmethod
    def step(self, step: jax.Array, *, masked: bool) -> None:
        """Any step but the last."""

    @abc.abstractmethod
    def end(self, step: jax.Array) -> None:
        """The last step, which also finishes what steps carry."""

    def slot(self, block: jax.Array | int) -> jax.Array | int:
        """Where a key block lies in rings of `sizes.slots`."""
        return block & (self.sizes.slots - 1)

    @property
    def is_first(self) -> jax.Array:
        """Whether this program is the first on its core."""
        return (self.local_stream == 0) & (self.head == 0)

    def first(self) -> None:
        """What the first program does before anything else: scratch stays as it is from program to program."""
        self.distance[...] = distances().astype(jnp.float32)
        self.spread[...] = dropout.spread(distances())
        self._start(self.stream, self.head, 1)

    # ------------------------------------------------------------------------------------------ the head's own lanes

    def take(self, ref: Ref, block: int, lane: int) -> jax.Array:
        """The head's lanes of a query block, moved to start at `lane`, zeros beside them; ref is [1, T, H·K]."""
        first, count = self._lanes()
        tile = _roll(self._read(ref, block, 0), lane - first)
        if count > 1:
            behind = _roll(self._read(ref, block, 1), lane - first)
            tile = jnp.where(iota(1) - lane + first < BLOCK, tile, behind)
        return jnp.where(_between(iota(1) - lane, 0, self.sizes.head_width), tile, 0.0)

    def put(self, ref: Ref, block: int, lane: int, tile: jax.Array) -> None:
        """The inverse of `take`: other heads' lanes stay as they are."""
        first, count = self._lanes()
        tile = _roll(tile.astype(ref.dtype), first - lane)
        for number in range(count):
            mine = _between(iota(1) + number * BLOCK - first, 0, self.sizes.head_width)
            merged = jnp.where(mine, tile, self._read(ref, block, number).astype(jnp.float32))
            ref[0, rows(block), self._aligned(ref, number)] = merged.astype(ref.dtype)

    def inner_product(self, a: Ref, b: Ref, block: int) -> jax.Array:
        """Σ over the head's lanes of a · b, for every query of a block: [128, 1]."""
        first, count = self._lanes()
        total = jnp.zeros((BLOCK, 1), jnp.float32)
        for number in range(count):
            mine = _between(iota(1) + number * BLOCK - first, 0, self.sizes.head_width)
            product = self._read(a, block, number).astype(jnp.float32) * self._read(b, block, number)
            total += jnp.sum(jnp.where(mine, product, 0.0), axis=1, keepdims=True)
        return total

    def _lanes(self) -> tuple[jax.Array, int]:
        """(the head's first lane within a register, how many registers it may stretch over)."""
        width = self.sizes.head_width
        return lax.rem(self.head * width, BLOCK), 1 if BLOCK % width == 0 else 2

    def _read(self, ref: Ref, block: int, number: int) -> jax.Array:
        return ref[0, rows(block), self._aligned(ref, number)]

    def _aligned(self, ref: Ref, number: int) -> Any:
        return pl.ds(pl.multiple_of(self._register(ref, number) * BLOCK, BLOCK), BLOCK)

    def _register(self, ref: Ref, number: int) -> jax.Array:
        return jnp.minimum(lax.div(self.head * self.sizes.head_width, BLOCK) + number, ref.shape[2] // BLOCK - 1)

    # --------------------------------------------------------------------------------------------- mask and dropout

    def masks(self, step: jax.Array, z_ref: Ref) -> list[tuple[jax.Array, jax.Array]]:
        """For each query block of a step: the mask, and 1 where it has a derivative with respect to z."""
        sizes = self.sizes
        count = sizes.blocks if sizes.per_query or sizes.has_valid_length else 1
        found = [self._mask(step, z_ref, block) for block in range(count)]
        return found * (sizes.blocks // count)

    def _mask(self, step: jax.Array, z_ref: Ref, block: int) -> tuple[jax.Array, jax.Array]:
        sizes = self.sizes
        z = column(z_ref[0, 0, :, rows(block)]) if sizes.per_query else self.scalars.z_H[self.head]
        distance = self.distance[...] + (step * BLOCK).astype(jnp.float32)
        visible = distance <= sizes.limit
        if sizes.has_valid_length:
            query = (iota(0) + block * BLOCK).astype(jnp.float32)
            visible = visible & (distance - query <= self.scalars.place[2].astype(jnp.float32))
        mask = jnp.where(visible, soft_mask(distance, z, sizes.ramp), 0.0)
        return mask, jnp.where(visible & on_ramp(distance, z, sizes.ramp), 1.0, 0.0)

    def query_words(self, query: jax.Array) -> jax.Array:
        """Dropout's words of queries, given their numbers in the segment."""
        word = self.scalars.word_N[self.stream * self.sizes.heads + self.head]
        return dropout.mix(word ^ dropout.spread(query))

    def spread_distance(self, step: jax.Array) -> jax.Array:
        """The distances of a step, as dropout folds them into a word: `spread` is linear in them."""
        return self.spread[...] + step.astype(jnp.uint32) * jnp.uint32(BLOCK * dropout.SPREAD % 2**32)

    def kept(self, word: jax.Array, spread: jax.Array) -> jax.Array:
        """Which weights dropout keeps."""
        return dropout.kept(dropout.mix(word ^ spread), self.sizes.dropout)

    # -------------------------------------------------------------------------------------------------- memory blocks
    #
    # Step n is the first to read key block −1 − n, through query block 0. That of step 0 comes projected; those of
    # steps 1, 2, … are copied from the ring. The copy for step 1 is started by the program before, those for the next
    # steps when the program begins, and each step starts one more.

    def start_copies(self) -> None:
        """At the beginning of a program that takes steps."""
        for step in range(2, 1 + AHEAD):
            self._start(self.stream, self.head, step)

    def advance_copies(self, step: jax.Array) -> None:
        """In each step but the last: starts one more copy, and waits for the block of step + 2, which it projects."""
        self._start(self.stream, self.head, step + 1 + AHEAD)
        self.wait(step + 2)

    def start_next_program(self) -> None:
        """At the end of a program."""
        is_last_head = self.head == self.sizes.heads - 1
        stream = jnp.where(is_last_head, self.stream + 1, self.stream)
        head = jnp.where(is_last_head, 0, self.head + 1)

        @pl.when(~is_last_head | (self.local_stream < self.sizes.streams_per_core - 1))
        def _() -> None:
            self._start(stream, head, 1)

    def wait(self, step: jax.Array | int) -> None:
        """Waits for the copy of a step's block, if the head takes that step."""

        @pl.when(step < self.steps)
        def _() -> None:
            self._copy(self.stream, step).wait()

    def hidden(self, step: jax.Array | int) -> jax.Array:
        """A step's memory block."""
        return self.blocks.hidden_XJD[self._hidden_slot(step)].astype(self.weights_DE.dtype)

    def project(self, step: jax.Array | int) -> jax.Array:
        """The keys and values of a step's memory block: [128, E]. Keys are scaled like those of the segment."""
        lanes = 2 * self.sizes.part
        first = pl.multiple_of(self.head * lanes, BLOCK)
        projected = dot(self.hidden(step), self.weights_DE[:, pl.ds(first, lanes)])
        scale = jnp.where(iota(1, (1, lanes)) < self.sizes.part, self.sizes.score_scale, 1.0)
        return (projected * scale).astype(self.weights_DE.dtype)

    def _start(self, stream: jax.Array, head: jax.Array, step: jax.Array | int) -> None:
        @pl.when(step < self.scalars.steps_H[head])
        def _() -> None:
            self._copy(stream, step).start()

    def _copy(self, stream: jax.Array, step: jax.Array | int) -> Any:
        layer, end = self.scalars.place[0], self.scalars.place[1]
        row = end - BLOCK * (step + 1)
        row = pl.multiple_of(jnp.where(row < 0, row + self.sizes.ring, row), BLOCK)
        slot = self._hidden_slot(step)
        source = self.blocks.memory_LBMD.at[layer, stream, pl.ds(row, BLOCK), :]
        return pltpu.make_async_copy(source, self.blocks.hidden_XJD.at[slot], self.blocks.semaphore_X.at[slot])

    def _hidden_slot(self, step: jax.Array | int) -> jax.Array | int:
        return step & (self.blocks.hidden_XJD.shape[0] - 1)


def _roll(tile: jax.Array, lanes: jax.Array | int) -> jax.Array:
    """The tile with its lanes rolled right, in float32; two rows of bfloat16 at a time."""
    lanes = lax.rem(lanes + BLOCK, BLOCK)
    if tile.dtype == jnp.bfloat16:
        tile = pltpu.bitcast(pltpu.roll(pltpu.bitcast(tile, jnp.uint32), lanes, 1), jnp.bfloat16)
    else:
        tile = pltpu.roll(tile, lanes, 1)
    return tile.astype(jnp.float32)


def _between(number: jax.Array, low: jax.Array | int, high: jax.Array | int) -> jax.Array:
    return (number >= low) & (number < high)
