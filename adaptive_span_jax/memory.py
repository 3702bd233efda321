"""Segment memory: the last S inputs of every layer, carried from one segment to the next without gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


class Memory(NamedTuple):
    """What the model remembers of each stream, oldest position first."""

    hidden_LBSD: jax.Array
    filled: jax.Array  # how many of the S positions hold states of real tokens

    @classmethod
    def zeros(cls, layers: int, streams: int, limit: int, width: int, dtype: DTypeLike) -> "Memory":
        """The memory of streams that have seen nothing."""
        return cls(jnp.zeros((layers, streams, limit, width), dtype), jnp.zeros((), jnp.int32))

    def advance(self, inputs_LBTD: jax.Array) -> "Memory":
        """The memory after one more segment, given every layer's input for it."""
        limit, length = self.hidden_LBSD.shape[2], inputs_LBTD.shape[2]
        filled = jnp.minimum(self.filled + length, limit)
        return Memory(shift_in(self.hidden_LBSD, inputs_LBTD), filled)

    def layer(self, index: jax.Array | int) -> "LayerMemory":
        """One layer's memory."""
        return LayerMemory(self.hidden_LBSD, jnp.asarray(index))

    def forget_if(self, fresh: jax.Array) -> "Memory":
        """This memory, or an empty one where a stream starts anew."""
        return jax.tree.map(lambda leaf: jnp.where(fresh, jnp.zeros((), leaf.dtype), leaf), self)


class LayerMemory(NamedTuple):
    """One layer's memory, read block by block: to take it out of the stack whole would be to copy it."""

    hidden_LBSD: jax.Array
    index: jax.Array

    @property
    def limit(self) -> int:
        """S, how many positions are remembered."""
        return self.hidden_LBSD.shape[2]

    def block(self, first: jax.Array | int, size: int) -> jax.Array:
        """`size` positions from `first` on, counted from the oldest: block_BJD."""
        _, streams, _, width = self.hidden_LBSD.shape
        corner = [jnp.asarray(start, jnp.int32) for start in (self.index, 0, first, 0)]
        return jax.lax.dynamic_slice(self.hidden_LBSD, corner, (1, streams, size, width))[0]

    def whole(self) -> jax.Array:
        """All of it: memory_BSD."""
        return self.block(0, self.limit)


def shift_in(memory: jax.Array, segment: jax.Array) -> jax.Array:
    """Appends a segment along the position axis (the last but one) and keeps as many positions as before, the newest."""
    length = memory.shape[-2]
    both = jnp.concatenate([memory, jax.lax.stop_gradient(segment).astype(memory.dtype)], axis=-2)
    return both[..., -length:, :]
