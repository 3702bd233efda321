"""One far tile of attention: a block of queries against a block of keys, of some heads, forward and backward.

Query c and key j of a tile are x = offset + c − j positions apart. Position scores come by distance and are needed by
key; skew.py says how one becomes the other.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from adaptive_span_jax.model.attention import online_softmax, skew

# Products with the position table are by chunks of at most so many queries. All C queries of a tile meet C + J
# distances, of which each meets J: the fewer queries, the less is computed and stored in vain.
_POSITION_CHUNK = 128


class Tile(NamedTuple):
    """What a tile is computed from."""

    query_BHCK: jax.Array  # already scaled by 1/√K
    key_BHJK: jax.Array
    value_BHJK: jax.Array
    table_YK: jax.Array  # position embeddings of the distances offset + C − 1 down to offset − J, so Y = C + J
    pairs: online_softmax.Pairs


class TileGradients(NamedTuple):
    """The gradients of a tile's inputs."""

    query_BHCK: jax.Array
    key_BHJK: jax.Array
    value_BHJK: jax.Array
    table_YK: jax.Array
    z_BHC1: jax.Array


def position_chunks(queries: int) -> int:
    """N, the number of chunks that a tile's queries are cut into for products with the position table."""
    return min(n for n in range(1, queries + 1) if queries % n == 0 and queries // n <= _POSITION_CHUNK)


def make_scratch(streams: int, heads: int, queries: int, keys: int, dtype: DTypeLike) -> jax.Array:
    """The scratch for the gradients of the first tile."""
    chunks = position_chunks(queries)
    return skew.make_scratch((chunks, streams, heads), queries // chunks, keys, dtype)


def distances(offset: jax.Array | int, queries: int, keys: int) -> jax.Array:
    """The distance between each query and each key of a tile: x_CJ."""
    return offset + jnp.arange(queries)[:, None] - jnp.arange(keys)[None, :]


def accumulate(running: online_softmax.Running, tile: Tile, ramp: int) -> online_softmax.Running:
    """The softmax over the keys seen so far and those of one more tile."""

    def weigh(weight_BHCJ: jax.Array) -> jax.Array:
        weight_BHCJ = weight_BHCJ.astype(tile.value_BHJK.dtype)
        return jnp.einsum("BHCJ,BHJK->BHCK", weight_BHCJ, tile.value_BHJK, preferred_element_type=running.output.dtype)

    return online_softmax.accumulate(running, _scores(tile), tile.pairs, ramp, weigh)


def gradients(
    tile: Tile, ramp: int, log_sum: jax.Array, d_output_BHCK: jax.Array, d_dot: jax.Array, scratch: jax.Array
) -> tuple[TileGradients, jax.Array]:
    """(the gradients of one tile, the scratch for the next).

    Needs the log-sum-exp over all tiles, d_output, d_dot (see `online_softmax.gradients`), and a scratch from
    `make_scratch` or from the tile before.
    """
    score_BHCJ = _scores(tile)
    accum_dtype, compute_dtype = score_BHCJ.dtype, tile.query_BHCK.dtype
    d_output_BHCK = d_output_BHCK.astype(compute_dtype)
    d_weight_BHCJ = jnp.einsum("BHCK,BHJK->BHCJ", d_output_BHCK, tile.value_BHJK, preferred_element_type=accum_dtype)
    grads = online_softmax.gradients(score_BHCJ, tile.pairs, ramp, log_sum, d_weight_BHCJ, d_dot)
    d_score_BHCJ, weight_BHCJ = grads.d_score.astype(compute_dtype), grads.weight.astype(compute_dtype)
    query_NBHCK, table_NYK = _chunks(tile.query_BHCK), _chunk_tables(tile)
    d_position_NBHCY, scratch = skew.tile_by_distance(_chunks(d_score_BHCJ), scratch)
    d_query_NBHCK = _by_chunk("BHCY,YK->BHCK", d_position_NBHCY, table_NYK)
    # With three axes to sum over, XLA:GPU would transpose the whole tile first.
    rows = (array.reshape(array.shape[0], -1, array.shape[-1]) for array in (d_position_NBHCY, query_NBHCK))
    d_table_NYK = _by_chunk("XY,XK->YK", *rows)
    tile_grads = TileGradients(
        query_BHCK=jnp.einsum("BHCJ,BHJK->BHCK", d_score_BHCJ, tile.key_BHJK, preferred_element_type=accum_dtype)
        + _join_chunks(d_query_NBHCK),
        key_BHJK=jnp.einsum("BHCJ,BHCK->BHJK", d_score_BHCJ, tile.query_BHCK, preferred_element_type=accum_dtype),
        value_BHJK=jnp.einsum("BHCJ,BHCK->BHJK", weight_BHCJ, d_output_BHCK, preferred_element_type=accum_dtype),
        table_YK=_join_tables(d_table_NYK, query_NBHCK.shape[3]),
        z_BHC1=grads.d_z,
    )
    return tile_grads, scratch


def _scores(tile: Tile) -> jax.Array:
    accum_dtype = jnp.promote_types(tile.query_BHCK.dtype, jnp.float32)
    content_BHCJ = jnp.einsum("BHCK,BHJK->BHCJ", tile.query_BHCK, tile.key_BHJK, preferred_element_type=accum_dtype)
    position_NBHCY = _by_chunk("BHCK,YK->BHCY", _chunks(tile.query_BHCK), _chunk_tables(tile))
    return content_BHCJ + _join_chunks(skew.tile_by_key(position_NBHCY, tile.key_BHJK.shape[2]))


def _by_chunk(subscripts: str, left_N: jax.Array, right_N: jax.Array) -> jax.Array:
    """A product for each chunk."""

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.promote_types(left.dtype, jnp.float32))

    if left_N.shape[0] == 1:  # with an axis for a single chunk XLA:CPU transposes the table for every tile
        return product(left_N[0], right_N[0])[None]
    return jax.vmap(product)(left_N, right_N)


def _chunks(array_BHTX: jax.Array) -> jax.Array:
    """[B, H, N·C, X] → [N, B, H, C, X]; with chunks first, XLA:GPU multiplies them without a transpose."""
    streams, heads, queries, last = array_BHTX.shape
    chunks = position_chunks(queries)
    return jnp.moveaxis(array_BHTX.reshape(streams, heads, chunks, queries // chunks, last), 2, 0)


def _join_chunks(array_NBHCX: jax.Array) -> jax.Array:
    chunks, streams, heads, chunk, last = array_NBHCX.shape
    return jnp.moveaxis(array_NBHCX, 0, 2).reshape(streams, heads, chunks * chunk, last)


def _chunk_tables(tile: Tile) -> jax.Array:
    """The rows of a tile's table that each chunk of its queries meets: those of later queries start further away."""
    queries, keys = tile.query_BHCK.shape[2], tile.key_BHJK.shape[2]
    chunk = queries // position_chunks(queries)
    return jnp.stack([tile.table_YK[first : first + chunk + keys] for first in range(queries - chunk, -1, -chunk)])


def _join_tables(d_table_NYK: jax.Array, chunk: int) -> jax.Array:
    """The transpose of `_chunk_tables`."""
    before = range((d_table_NYK.shape[0] - 1) * chunk, -1, -chunk)
    padded = (
        jnp.pad(rows_YK, [(first, before[0] - first), (0, 0)])
        for first, rows_YK in zip(before, d_table_NYK, strict=True)
    )
    return functools.reduce(jnp.add, padded)
