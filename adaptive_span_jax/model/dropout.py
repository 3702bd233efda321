"""Dropout as a pure function of an activation's indices, by a counter-based hash.

Whether an activation is kept depends only on (seed, step, layer, place in the layer, stream, head, position, …), never
on how the work is split into blocks, batches or devices. A backward pass can recompute the same bits instead of storing
them. The hash is also far cheaper on CPU than threefry.

It folds one index after the other into a 32-bit word and mixes the word fully after each. Mixing only once, over the
XOR of seed and index, would make the masks of different seeds permutations of each other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

# Knuth's multiplicative constant: spreads consecutive indices over all 32 bits before they are XORed into the word.
SPREAD = 0x9E3779B1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["word", "stream_B"], meta_fields=["rate"])
@dataclasses.dataclass(frozen=True)
class Dropout:
    """The dropout of one place in the network: `at` folds in indices, `scale` gives the factors."""

    rate: float
    word: jax.Array
    stream_B: jax.Array | None = None  # the streams' numbers, unless they are 0, 1, 2, …

    @classmethod
    def create(
        cls, rate: float, seed: jax.Array | int, step: jax.Array | int, stream_B: jax.Array | None = None
    ) -> "Dropout":
        """The dropout of one training step."""
        return cls(rate, jnp.uint32(0), stream_B).at(seed).at(step)

    def at(self, index: jax.Array | int) -> "Dropout":
        """The dropout with an index folded in (a layer, a place in it), or an array of indices, one per element."""
        return dataclasses.replace(self, word=mix(self.word ^ spread(jnp.asarray(index))))

    def streams(self, count: int) -> jax.Array:
        """The numbers of the `count` streams of the batch."""
        return jnp.arange(count) if self.stream_B is None else self.stream_B

    def scale(self) -> jax.Array:
        """0 where dropped, 1 / (1 − rate) where kept, for every element of the word."""
        return jnp.where(kept(self.word, self.rate), jnp.float32(1 / (1 - self.rate)), jnp.float32(0))


def spread(index: jax.Array) -> jax.Array:
    """An index as it is XORed into a word."""
    return index.astype(jnp.uint32) * jnp.uint32(SPREAD) + jnp.uint32(1)


def mix(word: jax.Array) -> jax.Array:
    """A 32-bit finalizer: xor-shifts and odd multiplications, each invertible, so that no two words collide."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def kept(word: jax.Array, rate: float) -> jax.Array:
    """Whether dropout at this rate keeps the elements with these words."""
    return word >= jnp.uint32(round(rate * 2**32))
