"""One far tile of attention: a block of queries against a block of keys of one head, forwards and backwards.

A tile's query c and key j are x = offset + c − j positions apart. Position scores are wanted by key, [c, j], but come
by distance: one product of the queries with the table's rows for all distances in the tile, largest first, in which
each row is to be read one step further left than the row above. Seen as one long line of numbers that is a plain slice:

    by distance   . . a b c        by key   a b c        . . a b c . d e f . g h i . .
                  . d e f .    →            d e f            └───────┴───────┴─────     drop the first C − 1 numbers,
                  g h i . .                 g h i                                       break the line every Y − 1
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from adaptive_span_jax import softmax


class Tile(NamedTuple):
    """What a tile is computed from."""

    query_BCK: jax.Array  # already scaled by 1/√K
    key_BJK: jax.Array
    value_BJK: jax.Array
    table_YK: jax.Array  # position embeddings of the distances offset + C − 1 down to offset − J, so Y = C + J
    pairs: softmax.Pairs


class Gradients(NamedTuple):
    """The gradients of a tile's inputs."""

    query_BCK: jax.Array
    key_BJK: jax.Array
    value_BJK: jax.Array
    table_YK: jax.Array
    z_BC1: jax.Array


def distances(offset: jax.Array | int, queries: int, keys: int) -> jax.Array:
    """How far each query of a tile is from each key: x_CJ."""
    return offset + jnp.arange(queries)[:, None] - jnp.arange(keys)[None, :]


def accumulate(running: softmax.Running, tile: Tile, ramp: int) -> softmax.Running:
    """The softmax over the keys seen so far and those of one more tile."""

    def weigh(kept_BCJ: jax.Array) -> jax.Array:
        kept_BCJ = kept_BCJ.astype(tile.value_BJK.dtype)
        return jnp.einsum("BCJ,BJK->BCK", kept_BCJ, tile.value_BJK, preferred_element_type=running.output.dtype)

    return softmax.accumulate(running, _scores(tile), tile.pairs, ramp, weigh)


def gradients(
    tile: Tile, ramp: int, log_sum: jax.Array, d_output_BCK: jax.Array, d_dot: jax.Array, scratch: jax.Array
) -> tuple[Gradients, jax.Array]:
    """The gradients of one tile, given the log-sum-exp over all tiles, d_output and d_dot = Σ d_output·output.

    The scratch comes from `make_scratch` or from the tile before, and goes on to the next.
    """
    score_BCJ = _scores(tile)
    exact, compute = score_BCJ.dtype, tile.query_BCK.dtype
    d_output_BCK = d_output_BCK.astype(compute)
    d_weight_BCJ = jnp.einsum("BCK,BJK->BCJ", d_output_BCK, tile.value_BJK, preferred_element_type=exact)
    found = softmax.gradients(score_BCJ, tile.pairs, ramp, log_sum, d_weight_BCJ, d_dot)
    d_score_BCJ, kept_BCJ = found.d_score.astype(compute), found.kept.astype(compute)
    d_position_BCY, scratch = unskew(d_score_BCJ, scratch)
    found_here = Gradients(
        query_BCK=jnp.einsum("BCJ,BJK->BCK", d_score_BCJ, tile.key_BJK, preferred_element_type=exact)
        + jnp.einsum("BCY,YK->BCK", d_position_BCY, tile.table_YK, preferred_element_type=exact),
        key_BJK=jnp.einsum("BCJ,BCK->BJK", d_score_BCJ, tile.query_BCK, preferred_element_type=exact),
        value_BJK=jnp.einsum("BCJ,BCK->BJK", kept_BCJ, d_output_BCK, preferred_element_type=exact),
        table_YK=jnp.einsum("BCY,BCK->YK", d_position_BCY, tile.query_BCK, preferred_element_type=exact),
        z_BC1=found.d_z,
    )
    return found_here, scratch


def skew(by_distance: jax.Array, keys: int) -> jax.Array:
    """[…, C, Y] by distance → […, C, J] by key."""
    *outer, queries, rows = by_distance.shape
    flat = by_distance.reshape(*outer, queries * rows)[..., queries - 1 : -1]
    return flat.reshape(*outer, queries, rows - 1)[..., :keys]


def make_scratch(streams: int, queries: int, keys: int, dtype: DTypeLike) -> jax.Array:
    """What `unskew` writes into: zeros, of which it only ever touches the same rectangle."""
    return jnp.zeros((streams, queries + 2, queries + keys - 1), dtype)


def unskew(by_key_BCJ: jax.Array, scratch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[B, C, J] by key → [B, C, Y] by distance, 0 at distances that a query does not have: the transpose of `skew`.

    The scratch has the rows the right distance apart, so the result is one slice of it. It is carried from tile to
    tile because XLA on CPU would otherwise pad by computing the whole chain behind `by_key` once more, element by
    element.
    """
    streams, queries, keys = by_key_BCJ.shape
    scratch = jax.lax.dynamic_update_slice(scratch, by_key_BCJ, (0, 1, 0))
    line = scratch.reshape(streams, -1)[:, keys : keys + queries * (queries + keys)]
    return line.reshape(streams, queries, queries + keys), scratch


def _scores(tile: Tile) -> jax.Array:
    exact = jnp.promote_types(tile.query_BCK.dtype, jnp.float32)
    content_BCJ = jnp.einsum("BCK,BJK->BCJ", tile.query_BCK, tile.key_BJK, preferred_element_type=exact)
    position_BCY = jnp.einsum("BCK,YK->BCY", tile.query_BCK, tile.table_YK, preferred_element_type=exact)
    return content_BCJ + skew(position_BCY, tile.key_BJK.shape[1])
