"""The KV cache: keys and values of past positions, only as far back as each head reads, and attention over them.

Training projects memory again at every step, because the weights have changed. A decoder's weights are fixed, so it
projects each position once. Each group of heads has a ring buffer of length M. Position p is in row p mod M and is
overwritten in place. Rows are never reordered: softmax does not depend on their order, so attention reads the ring as
it is, and the position table, which all streams and heads share, is rotated instead.

    ring, M = 192, at position 320    [ 192 … 255 | 256 … 319 | 320 … ]    row j is (320 − j) mod M positions back

Chunks of queries start at multiples of their length and M is a multiple of the longest, so a chunk never wraps around.
A chunk's own rows are written before they are read. A ring is one chunk longer than its heads read, so the rows that a
query must not see (its own and later ones) have distance 0 or a distance beyond the reach.

An empty row has key 0 and value 0, the projections of empty memory. As published, it is attended to unless
`model.mask_empty_memory` is set.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from adaptive_span_jax.inference.cache_plan import CHUNK, CachePlan
from adaptive_span_jax.model.attention.reference import masked_softmax
from adaptive_span_jax.model.attention.skew import tile_by_key
from adaptive_span_jax.model.span import soft_mask


class KVCache(NamedTuple):
    """The keys and values of each stream. Rings are grouped as in the plan: [layer][group]."""

    keys: tuple[tuple[jax.Array, ...], ...]  # of each group: keys_BHMK
    values: tuple[tuple[jax.Array, ...], ...]
    position: jax.Array  # of the next token
    valid_length: jax.Array  # the number of real tokens before it; negative while padding is still to come

    @classmethod
    def empty(cls, plan: CachePlan, streams: int, head_width: int, dtype: DTypeLike, padding: ArrayLike) -> "KVCache":
        """An empty cache for streams whose first `padding` tokens will be padding."""

        def rings() -> tuple[tuple[jax.Array, ...], ...]:
            return tuple(
                tuple(jnp.zeros((streams, len(group.heads), group.rows, head_width), dtype) for group in groups)
                for groups in plan
            )

        return cls(rings(), rings(), jnp.zeros((), jnp.int32), -jnp.asarray(padding, jnp.int32))


class Rings(NamedTuple):
    """Keys and values of one group of heads."""

    key_BHMK: jax.Array
    value_BHMK: jax.Array

    def extend(
        self,
        query_BTHK: jax.Array,
        key_BTHK: jax.Array,
        value_BTHK: jax.Array,
        positions_SK: jax.Array,
        z_BTH: jax.Array,
        position: jax.Array,
        *,
        ramp: int,
        valid_length: jax.Array | None = None,
    ) -> tuple[tuple[jax.Array, jax.Array], "Rings"]:
        """((output_BTHK, log_sum_BTH), the rings after T more positions from `position` on), chunk by chunk.

        With `valid_length`, positions before that many are not attended to.
        """
        size = min(query_BTHK.shape[1], CHUNK)

        def extend_by_chunk(rings: Rings, number: ArrayLike) -> tuple[Rings, tuple[jax.Array, jax.Array]]:
            def of_chunk(array: jax.Array) -> jax.Array:
                if array.shape[1] > 1:
                    array = jax.lax.dynamic_slice_in_dim(array, number * size, size, 1)
                return jnp.moveaxis(array, 2, 1)  # one chunk fits into the CPU's cache, all of T would not

            start = position + number * size
            rings = Rings(
                write(rings.key_BHMK, of_chunk(key_BTHK), start), write(rings.value_BHMK, of_chunk(value_BTHK), start)
            )
            output_BHCK, log_sum_BHC = attend(
                of_chunk(query_BTHK),
                *rings,
                positions_SK,
                of_chunk(z_BTH[..., None]),
                start,
                ramp=ramp,
                valid_length=None if valid_length is None else valid_length + number * size,
            )
            return rings, (jnp.moveaxis(output_BHCK, 1, 2), jnp.moveaxis(log_sum_BHC, 1, 2))

        rings, (output_NBCHK, log_sum_NBCH) = jax.lax.scan(
            extend_by_chunk, self, jnp.arange(query_BTHK.shape[1] // size)
        )
        output_BTHK = jnp.moveaxis(output_NBCHK, 0, 1).reshape(query_BTHK.shape)
        log_sum_BTH = jnp.moveaxis(log_sum_NBCH, 0, 1).reshape(query_BTHK.shape[:3])
        return (output_BTHK, log_sum_BTH), rings


def write(ring_BHMK: jax.Array, new_BHTK: jax.Array, position: jax.Array) -> jax.Array:
    """The ring with the keys or values of a chunk that starts at `position`."""
    new_BHTK = new_BHTK.astype(ring_BHMK.dtype)
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
    valid_length: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The attention of a group of heads to its rings, which already contain the chunk: (output_BHTK, log_sum_BHT).

    With `valid_length`, positions before that many are not attended to, as in `reference.attend`.
    """
    length, (rows, head_width), (limit, _) = query_BHTK.shape[2], key_BHMK.shape[2:], positions_SK.shape
    accum_dtype = jnp.promote_types(query_BHTK.dtype, jnp.float32)
    content_BHTM = jnp.einsum("BHTK,BHMK->BHTM", query_BHTK, key_BHMK, preferred_element_type=accum_dtype)

    # Row y of the rotated table is for the distance between row y of the ring and the last query; for each earlier
    # query, the same distance is one row further on. Distances of 0 or beyond S get an arbitrary row: the mask is 0.
    distance_Y = (position + length - 1 - jnp.arange(rows + length)) % rows
    rotated_YK = jnp.take(positions_SK, jnp.clip(distance_Y - 1, 0, limit - 1), axis=0)
    position_BHTY = jnp.einsum("BHTK,YK->BHTY", query_BHTK, rotated_YK, preferred_element_type=accum_dtype)
    score_BHTM = (content_BHTM + tile_by_key(position_BHTY, rows)) / math.sqrt(head_width)

    distance_TM = (position + jnp.arange(length)[:, None] - jnp.arange(rows)[None, :]) % rows
    mask_BHTM = soft_mask(distance_TM[None, None].astype(accum_dtype), z_BHT1.astype(accum_dtype), ramp)
    visible_TM = (distance_TM >= 1) & (distance_TM <= limit)
    if valid_length is not None:
        visible_TM &= distance_TM <= valid_length + jnp.arange(length)[:, None]
    weight_BHTM, log_sum_BHT = masked_softmax(score_BHTM, jnp.where(visible_TM[None, None], mask_BHTM, 0))
    return jnp.einsum("BHTM,BHMK->BHTK", weight_BHTM.astype(value_BHMK.dtype), value_BHMK), log_sum_BHT
