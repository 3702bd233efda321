"""Dropout as a pure function of where an activation stands, by a counter hash.

Whether an activation is kept depends only on (seed, step, layer, place in the layer, stream, head, position, …): never
on how the work is split into blocks, batches or devices, and a backward pass can draw the same bits again instead of
storing them. It is also far cheaper on CPU than threefry bits.

The hash folds one index after the other into a 32-bit word and mixes the word fully after each. Mixing only once, over
the exclusive or of seed and index, would make the masks of different seeds permutations of each other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

# Knuth's multiplicative constant: spreads consecutive indices over all 32 bits before they meet the word.
_SPREAD = 0x9E3779B1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["word", "stream_B"], meta_fields=["rate"])
@dataclasses.dataclass(frozen=True)
class Dropout:
    """The dropout of one place in the network; `at` narrows it down, `scale` draws it."""

    rate: float
    word: jax.Array
    stream_B: jax.Array | None = None  # the streams' numbers, where they are not all streams in order

    @classmethod
    def create(
        cls, rate: float, seed: jax.Array | int, step: jax.Array | int, stream_B: jax.Array | None = None
    ) -> "Dropout":
        """The dropout of one training step."""
        return cls(rate, jnp.uint32(0), stream_B).at(seed).at(step)

    def at(self, index: jax.Array | int) -> "Dropout":
        """The dropout of one part (a layer, a place in it) or, given an array of indices, of each of its elements."""
        return dataclasses.replace(self, word=_fold(self.word, jnp.asarray(index)))

    def streams(self, count: int) -> jax.Array:
        """The numbers of the `count` streams that are worked on."""
        return jnp.arange(count) if self.stream_B is None else self.stream_B

    def scale(self) -> jax.Array:
        """0 where dropped, 1 / (1 − rate) where kept, for every element that `at` has told apart."""
        kept = self.word >= jnp.uint32(round(self.rate * 2**32))
        return jnp.where(kept, jnp.float32(1 / (1 - self.rate)), jnp.float32(0))


def _fold(word: jax.Array, index: jax.Array) -> jax.Array:
    return _mix(word ^ (index.astype(jnp.uint32) * jnp.uint32(_SPREAD) + jnp.uint32(1)))


def _mix(word: jax.Array) -> jax.Array:
    # A 32-bit finaliser: xor-shifts and odd multiplications, each invertible, so that no two words fall together.
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
