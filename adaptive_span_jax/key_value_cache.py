"""Keys and values of past positions, projected once, kept only as far back as each head reads; and attention over them.

Training projects memory anew at every step, because the weights have changed. A finished model need not. Each group of
heads has rings of its own length M, position p in row p mod M, written in place. Nothing is ever moved: a softmax does
not mind the order of the rows, so attention works on the ring as it lies, and only the position table, which all
streams and heads share, is turned.

    ring, M = 192, at position 320    [ 192 … 255 | 256 … 319 | 320 … ]    row j is (320 − j) mod M positions back

Chunks of queries start at multiples of their length and M is a multiple of the longest, so a chunk lies in one piece.
Its own rows are written before they are read. A ring is a chunk longer than its heads read, so that rows which a query
must not see, its own and those after it, have a distance of 0 or one beyond the reach.

An empty row has key 0 and value 0, just what the zeros of empty memory are projected to: it is attended to, as
published.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from adaptive_span_jax.attention import masked_softmax
from adaptive_span_jax.head_reach import CHUNK, Plan
from adaptive_span_jax.span import soft_mask


class KeyValueCache(NamedTuple):
    """What a finished model remembers of each stream. Rings are grouped as in the plan: [layer][group]."""

    keys: tuple[tuple[jax.Array, ...], ...]  # of each group: keys_BHMK
    values: tuple[tuple[jax.Array, ...], ...]
    position: jax.Array  # of the next token
    first: jax.Array  # the position of the first token: what stands before it is padding and leaves its row empty

    @classmethod
    def empty(cls, plan: Plan, streams: int, head_width: int, dtype: DTypeLike, first: ArrayLike) -> "KeyValueCache":
        """The cache of streams that have seen nothing."""

        def rings() -> tuple[tuple[jax.Array, ...], ...]:
            return tuple(
                tuple(jnp.zeros((streams, len(group.heads), group.rows, head_width), dtype) for group in groups)
                for groups in plan
            )

        return cls(rings(), rings(), jnp.zeros((), jnp.int32), jnp.asarray(first, jnp.int32))


class Rings(NamedTuple):
    """Keys and values of one group of heads."""

    key_BHMK: jax.Array
    value_BHMK: jax.Array

    def read(
        self,
        query_BTHK: jax.Array,
        key_BTHK: jax.Array,
        value_BTHK: jax.Array,
        positions_SK: jax.Array,
        z_BTH: jax.Array,
        position: jax.Array,
        first: jax.Array,
        *,
        ramp: int,
        mask_empty: bool,
    ) -> tuple[jax.Array, "Rings"]:
        """Takes in the keys and values of T positions, chunk by chunk: (output_BTHK, the rings after them)."""
        size = min(query_BTHK.shape[1], CHUNK)

        def read_chunk(rings: Rings, number: ArrayLike) -> tuple[Rings, jax.Array]:
            def of_chunk(array: jax.Array) -> jax.Array:
                if array.shape[1] > 1:
                    array = jax.lax.dynamic_slice_in_dim(array, number * size, size, 1)
                return jnp.moveaxis(array, 2, 1)  # here, where a chunk is in the cache, rather than all T at once

            at = position + number * size
            rings = Rings(
                write(rings.key_BHMK, of_chunk(key_BTHK), at, first),
                write(rings.value_BHMK, of_chunk(value_BTHK), at, first),
            )
            empty_until = first if mask_empty else None
            output_BHCK = attend(
                of_chunk(query_BTHK), *rings, positions_SK, of_chunk(z_BTH[..., None]), at, ramp=ramp, first=empty_until
            )
            return rings, jnp.moveaxis(output_BHCK, 1, 2)

        rings, output_NBCHK = jax.lax.scan(read_chunk, self, jnp.arange(query_BTHK.shape[1] // size))
        return jnp.moveaxis(output_NBCHK, 0, 1).reshape(query_BTHK.shape), rings


def write(ring_BHMK: jax.Array, new_BHTK: jax.Array, position: jax.Array, first: jax.Array) -> jax.Array:
    """The ring with a chunk's keys or values in it; padding stays empty."""
    _, _, length, _ = new_BHTK.shape
    real_T = position + jnp.arange(length) >= first
    new_BHTK = jnp.where(real_T[None, None, :, None], new_BHTK, 0).astype(ring_BHMK.dtype)
    return jax.lax.dynamic_update_slice_in_dim(ring_BHMK, new_BHTK, position % ring_BHMK.shape[2], axis=2)


def attend(
    query_BHTK: jax.Array,
    key_BHMK: jax.Array,
    value_BHMK: jax.Array,
    positions_SK: jax.Array,
    z_BHT1: jax.Array,
    position: jax.Array,
    *,
    ramp: int,
    first: jax.Array | None = None,
) -> jax.Array:
    """A group of heads reads its rings, in which the chunk itself is already written: output_BHTK.

    With `first`, rows before that position, the empty ones, are not attended to.
    """
    length, (rows, head_width), (limit, _) = query_BHTK.shape[2], key_BHMK.shape[2:], positions_SK.shape
    exact = jnp.promote_types(query_BHTK.dtype, jnp.float32)
    content_BHTM = jnp.einsum("BHTK,BHMK->BHTM", query_BHTK, key_BHMK, preferred_element_type=exact)

    # Row y of the turned table belongs to the distance between row y of the ring and the last query; every query before
    # finds its own one row further on. Distances of 0 or beyond S get any row of the table: the mask is 0 there.
    away_Y = (position + length - 1 - jnp.arange(rows + length)) % rows
    turned_YK = jnp.take(positions_SK, jnp.clip(away_Y - 1, 0, limit - 1), axis=0)
    position_BHTY = jnp.einsum("BHTK,YK->BHTY", query_BHTK, turned_YK, preferred_element_type=exact)
    score_BHTM = (content_BHTM + _skew(position_BHTY, rows)) / math.sqrt(head_width)

    distance_TM = (position + jnp.arange(length)[:, None] - jnp.arange(rows)[None, :]) % rows
    mask_BHTM = soft_mask(distance_TM[None, None].astype(exact), z_BHT1.astype(exact), ramp)
    visible_TM = (distance_TM >= 1) & (distance_TM <= limit)
    if first is not None:
        visible_TM &= distance_TM <= position - first + jnp.arange(length)[:, None]
    weight_BHTM = masked_softmax(score_BHTM, jnp.where(visible_TM[None, None], mask_BHTM, 0))
    return jnp.einsum("BHTM,BHMK->BHTK", weight_BHTM.astype(value_BHMK.dtype), value_BHMK)


def _skew(rows: jax.Array, count: int) -> jax.Array:
    """[…, T, M + T] → […, T, M]: row t starts at column T − 1 − t, by reshaping rather than gathering."""
    *outer, length, width = rows.shape
    flat = rows.reshape(*outer, length * width)[..., length - 1 :]
    return flat[..., : length * (width - 1)].reshape(*outer, length, width - 1)[..., :count]
