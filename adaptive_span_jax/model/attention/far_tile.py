"""One far tile of attention: a block of queries against a block of keys of one head, forward and backward.

Query c and key j of a tile are x = offset + c − j positions apart. Position scores come by distance and are needed by
key; skew.py says how one becomes the other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_span_jax.model.attention import online_softmax, skew


class Tile(NamedTuple):
    """What a tile is computed from."""

    query_BCK: jax.Array  # already scaled by 1/√K
    key_BJK: jax.Array
    value_BJK: jax.Array
    table_YK: jax.Array  # position embeddings of the distances offset + C − 1 down to offset − J, so Y = C + J
    pairs: online_softmax.Pairs


class TileGradients(NamedTuple):
    """The gradients of a tile's inputs."""

    query_BCK: jax.Array
    key_BJK: jax.Array
    value_BJK: jax.Array
    table_YK: jax.Array
    z_BC1: jax.Array


def distances(offset: jax.Array | int, queries: int, keys: int) -> jax.Array:
    """The distance between each query and each key of a tile: x_CJ."""
    return offset + jnp.arange(queries)[:, None] - jnp.arange(keys)[None, :]


def accumulate(running: online_softmax.Running, tile: Tile, ramp: int) -> online_softmax.Running:
    """The softmax over the keys seen so far and those of one more tile."""

    def weigh(weight_BCJ: jax.Array) -> jax.Array:
        weight_BCJ = weight_BCJ.astype(tile.value_BJK.dtype)
        return jnp.einsum("BCJ,BJK->BCK", weight_BCJ, tile.value_BJK, preferred_element_type=running.output.dtype)

    return online_softmax.accumulate(running, _scores(tile), tile.pairs, ramp, weigh)


def gradients(
    tile: Tile, ramp: int, log_sum: jax.Array, d_output_BCK: jax.Array, d_dot: jax.Array, scratch: jax.Array
) -> tuple[TileGradients, jax.Array]:
    """(the gradients of one tile, the scratch for the next).

    Needs the log-sum-exp over all tiles, d_output, d_dot (see `online_softmax.gradients`), and a scratch from
    `skew.make_scratch` or from the tile before.
    """
    score_BCJ = _scores(tile)
    accum_dtype, compute_dtype = score_BCJ.dtype, tile.query_BCK.dtype
    d_output_BCK = d_output_BCK.astype(compute_dtype)
    d_weight_BCJ = jnp.einsum("BCK,BJK->BCJ", d_output_BCK, tile.value_BJK, preferred_element_type=accum_dtype)
    grads = online_softmax.gradients(score_BCJ, tile.pairs, ramp, log_sum, d_weight_BCJ, d_dot)
    d_score_BCJ, weight_BCJ = grads.d_score.astype(compute_dtype), grads.weight.astype(compute_dtype)
    d_position_BCY, scratch = skew.tile_by_distance(d_score_BCJ, scratch)
    tile_grads = TileGradients(
        query_BCK=jnp.einsum("BCJ,BJK->BCK", d_score_BCJ, tile.key_BJK, preferred_element_type=accum_dtype)
        + jnp.einsum("BCY,YK->BCK", d_position_BCY, tile.table_YK, preferred_element_type=accum_dtype),
        key_BJK=jnp.einsum("BCJ,BCK->BJK", d_score_BCJ, tile.query_BCK, preferred_element_type=accum_dtype),
        value_BJK=jnp.einsum("BCJ,BCK->BJK", weight_BCJ, d_output_BCK, preferred_element_type=accum_dtype),
        table_YK=jnp.einsum("BCY,BCK->YK", d_position_BCY, tile.query_BCK, preferred_element_type=accum_dtype),
        z_BC1=grads.d_z,
    )
    return tile_grads, scratch


def _scores(tile: Tile) -> jax.Array:
    accum_dtype = jnp.promote_types(tile.query_BCK.dtype, jnp.float32)
    content_BCJ = jnp.einsum("BCK,BJK->BCJ", tile.query_BCK, tile.key_BJK, preferred_element_type=accum_dtype)
    position_BCY = jnp.einsum("BCK,YK->BCY", tile.query_BCK, tile.table_YK, preferred_element_type=accum_dtype)
    return content_BCJ + skew.tile_by_key(position_BCY, tile.key_BJK.shape[1])
