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

    def forget_if(self, fresh: jax.Array) -> "Memory":
        """This memory, or an empty one where a stream starts anew."""
        return jax.tree.map(lambda leaf: jnp.where(fresh, jnp.zeros((), leaf.dtype), leaf), self)


def shift_in(memory: jax.Array, segment: jax.Array) -> jax.Array:
    """Appends a segment along the position axis (the last but one) and keeps as many positions as before, the newest."""
    length = memory.shape[-2]
    both = jnp.concatenate([memory, jax.lax.stop_gradient(segment).astype(memory.dtype)], axis=-2)
    return both[..., -length:, :]
