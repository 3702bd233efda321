"""Segment memory: the last S inputs of every layer, carried from one segment to the next without gradient.

It is a ring buffer. A step overwrites the oldest segment in place and moves nothing else; shifting all of S = 8192
took 4 % of a step and a second copy of the memory. The ring holds a whole number of segments, so a segment never wraps
around. Its first rows are repeated behind its last, so that any block of up to MIRRORED rows is one slice, and a longer
one a few:

    ring  [ segment 4 ][ segment 1 ][ segment 2 ][ segment 3 ][ segment 4 ]
                       ↑ end: the next segment goes here       └ mirror ┘
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from adaptive_span_jax.model.linear import row_major
from adaptive_span_jax.runtime import sharding

# The longest block that is sure to be one slice. Checkpoints contain the mirror, so it is the same on every platform.
MIRRORED = 128

# What compiled programs call the loop that writes a segment.
WRITE_SCOPE = "write_memory"


class Memory(NamedTuple):
    """What the model remembers of each stream. M rows: the ring and its mirror."""

    hidden_LBMD: jax.Array
    end: jax.Array  # the row after the newest
    filled: jax.Array  # checkpoints store it under this name; everywhere else it is `valid_length`

    @property
    def valid_length(self) -> jax.Array:
        """How many positions before the segment hold states of real tokens, at most S."""
        return self.filled

    @classmethod
    def zeros(cls, layers: int, streams: int, limit: int, segment: int, width: int, dtype: DTypeLike) -> "Memory":
        """The memory of streams that have seen nothing, for segments of one length."""
        rows = ring_rows(limit, segment) + _whole_segments(MIRRORED, segment)
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.zeros((layers, streams, rows, width), dtype), zero, zero)

    def advance(self, inputs_LBTD: jax.Array, limit: int, good: jax.Array | bool = True) -> "Memory":
        """The memory after one more segment, given every layer's input for it; unchanged if the segment is not `good`.

        `good` should depend on everything that reads this memory. Only then can XLA prove that all reads precede the
        write, and write in place; otherwise it copies the whole memory in every step.
        """
        layers, streams, segment, width = inputs_LBTD.shape
        ring = ring_rows(limit, segment)
        new_LB1TD = inputs_LBTD.astype(self.hidden_LBMD.dtype)[:, :, None]
        rows, number = self.hidden_LBMD.shape[2], self.end // segment

        # Addressed by segment: XLA:TPU does not see that `end` is a multiple of the segment, and would shift every row
        # on its way, in 659,000 cycles instead of 14,000. Written twice where the mirror repeats it, never if not good.
        def write(copy: jax.Array, hidden_LBGTD: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(hidden_LBGTD, new_LB1TD, number + copy * (ring // segment), 2)

        copies = jnp.where(good, jnp.where(self.end < rows - ring, 2, 1), 0)
        hidden_LBGTD = self.hidden_LBMD.reshape(layers, streams, rows // segment, segment, width)
        with jax.named_scope(WRITE_SCOPE):
            hidden_LBGTD = jax.lax.fori_loop(0, copies, write, hidden_LBGTD)
        end, valid_length = (self.end + segment) % ring, jnp.minimum(self.valid_length + segment, limit)
        return Memory(
            hidden_LBGTD.reshape(self.hidden_LBMD.shape),
            jnp.where(good, end, self.end),
            jnp.where(good, valid_length, self.valid_length),
        )

    def layer(self, index: jax.Array | int, limit: int, segment: int) -> "LayerMemory":
        """One layer's memory, as a segment of this length reads it."""
        return LayerMemory(self.hidden_LBMD, self.end, jnp.asarray(index), limit, ring_rows(limit, segment))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["hidden_LBMD", "end", "index"], meta_fields=["limit", "ring"]
)
@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """One layer's memory, read block by block: slicing the whole layer out of the stack would copy it."""

    hidden_LBMD: jax.Array
    end: jax.Array
    index: jax.Array  # of the layer
    limit: int  # S
    ring: int

    @classmethod
    def of(cls, memory_BSD: jax.Array) -> "LayerMemory":
        """The memory in a plain array, oldest position first."""
        limit, zero = memory_BSD.shape[1], jnp.zeros((), jnp.int32)
        return cls(memory_BSD[None], zero, zero, limit, limit)

    def newest(self, size: int) -> jax.Array:
        """The newest `size` positions, newest_BJD; `size` must divide the segment and the ring."""
        layers, streams, rows, width = self.hidden_LBMD.shape
        # Addressed by block, like the writes in `Memory.advance`.
        hidden_LBXJD = self.hidden_LBMD.reshape(layers, streams, rows // size, size, width)
        number = (self.end - size) % self.ring // size
        corner = [jnp.asarray(start, jnp.int32) for start in (self.index, 0, number, 0, 0)]
        # Otherwise XLA:TPU may copy the whole memory into the layout in which a block of it is used.
        block = row_major(jax.lax.dynamic_slice(hidden_LBXJD, corner, (1, streams, 1, size, width)))
        return _opaque(block[0, :, 0])

    def with_stream_axis(self, axis: Any) -> "LayerMemory":
        """For a tree that has an axis of streams in place of each array: that of the hidden states is `axis`."""
        return dataclasses.replace(self, hidden_LBMD=axis)

    def block(self, back: jax.Array | int, size: int) -> jax.Array:
        """The `size` positions that start `back` positions before the segment: block_BJD."""
        longest = max(MIRRORED, self.hidden_LBMD.shape[2] - self.ring)
        slices = [self._slice(back - first, min(longest, size - first)) for first in range(0, size, longest)]
        return _opaque(slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=1))

    def _slice(self, back: jax.Array | int, size: int) -> jax.Array:
        """The same for no more rows than the mirror has."""
        _, streams, _, width = self.hidden_LBMD.shape
        row = (self.end - back) % self.ring
        corner = [jnp.asarray(start, jnp.int32) for start in (self.index, 0, row, 0)]
        return jax.lax.dynamic_slice(self.hidden_LBMD, corner, (1, streams, size, width))[0]

    def to_array(self) -> jax.Array:
        """A copy of all S positions, oldest first: memory_BSD."""
        rows = (self.end - self.limit + jnp.arange(self.limit)) % self.ring
        layer_BMD = jax.lax.dynamic_index_in_dim(self.hidden_LBMD, self.index, keepdims=False)
        return jnp.take(layer_BMD, rows, axis=1)


def _opaque(block: jax.Array) -> jax.Array:
    """The block, multiplied by a 1 that the compiler cannot see.

    TPUs multiply float32 as bfloat16. XLA:TPU hoists that cast over slices, so it would cast the whole memory, into a
    copy and twice a step, instead of each block that is read. It does not hoist a cast over arithmetic.
    """
    return block * jax.lax.optimization_barrier(jnp.ones((), block.dtype))


def memory_sharding(mesh: Mesh, streams: int) -> Any:
    """The shardings of a memory's arrays, as a `Memory`."""
    shardings: Any = Memory
    return shardings(sharding.by_stream(mesh, streams, axis=1), sharding.replicated(mesh), sharding.replicated(mesh))


def shift_in(memory_BSD: jax.Array, segment_BTD: jax.Array) -> jax.Array:
    """A plain memory array after one more segment."""
    both = jnp.concatenate([memory_BSD, jax.lax.stop_gradient(segment_BTD).astype(memory_BSD.dtype)], axis=1)
    return both[:, -memory_BSD.shape[1] :]


def ring_rows(limit: int, segment: int) -> int:
    """How many rows the ring has: S, rounded up to whole segments."""
    return _whole_segments(limit, segment)


def _whole_segments(rows: int, segment: int) -> int:
    return -(-rows // segment) * segment
