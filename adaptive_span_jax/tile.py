"""One tile of attention: a block of queries against a block of keys, forwards and backwards.

A tile's query c and key j are x = offset + c − j positions apart. Position scores are wanted by key, [c, j], but come by
distance: one product of the queries with the table's rows for all distances in the tile, largest first, in which each row
is to be read one step further left than the row above. Seen as one long line of numbers that is a plain slice:

    by distance   . . a b c        by key   a b c        . . a b c . d e f . g h i . .
                  . d e f .    →            d e f            └───────┴───────┴─────     drop the first C − 1 numbers,
                  g h i . .                 g h i                                       break the line every Y − 1

The softmax is taken over many tiles, one after the other (`Running`); the backward pass computes each tile again from the
final log-sum-exp instead of storing it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_span_jax.dropout import Dropout


class Running(NamedTuple):
    """A softmax over the keys seen so far."""

    top: jax.Array  # the largest score with a mask above 0, […, C, 1]
    total: jax.Array  # Σ m·exp(s − top), […, C, 1]
    output: jax.Array  # Σ m·exp(s − top)·value, […, C, K]


class Tile(NamedTuple):
    """What a tile is computed from. Leading axes are the same everywhere or of size 1."""

    query: jax.Array  # […, C, K], already scaled by 1/√K
    key: jax.Array  # […, J, K]
    value: jax.Array  # […, J, K]
    table_YK: jax.Array  # position embeddings of the distances offset + C − 1 down to offset − J, so Y = C + J
    distance: jax.Array  # x, [C, J] with leading axes of size 1
    visible: jax.Array  # whether the query may see the key in this tile at all
    z: jax.Array  # […, C, 1]
    dropout: Dropout | None  # already told apart by stream, head and query


class Gradients(NamedTuple):
    """The gradients of a tile's inputs."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    table_YK: jax.Array
    z: jax.Array  # […, C, 1]


def distances(offset: jax.Array | int, queries: int, keys: int) -> jax.Array:
    """How far each query of a tile is from each key: x_CJ."""
    return offset + jnp.arange(queries)[:, None] - jnp.arange(keys)[None, :]


def start(score_dtype: jnp.dtype, shape: tuple[int, ...]) -> Running:
    """The softmax over no keys, for an output of a shape."""
    rows = (*shape[:-1], 1)
    # Finite, so that differences of it are; far below any score.
    lowest = jnp.full(rows, jnp.finfo(score_dtype).min / 4, score_dtype)
    return Running(lowest, jnp.zeros(rows, score_dtype), jnp.zeros(shape, score_dtype))


def accumulate(running: Running, tile: Tile, ramp: int) -> Running:
    """The softmax over the keys seen so far and those of one more tile."""
    score, mask = _scores(tile), _mask(tile, ramp)
    top = jnp.maximum(running.top, jnp.max(score, axis=-1, keepdims=True, where=mask > 0, initial=-jnp.inf))
    # Scores outside the mask may be larger than `top`; without a limit infinity times 0 would be no number.
    weight = mask * jnp.exp(jnp.minimum(score - top, 0))
    earlier = jnp.exp(running.top - top)
    total = running.total * earlier + weight.sum(axis=-1, keepdims=True)
    # Dropout acts after normalising, so the total counts dropped weights too.
    kept = (weight if tile.dropout is None else weight * _keep(tile)).astype(tile.value.dtype)
    output = jnp.einsum("...CJ,...JK->...CK", kept, tile.value, preferred_element_type=score.dtype)
    return Running(top, total, running.output * earlier + output)


def finish(running: Running) -> tuple[jax.Array, jax.Array]:
    """(the weighted average of the values, the log-sum-exp); the average over no keys at all is 0."""
    total = jnp.where(running.total > 0, running.total, 1)
    return running.output / total, running.top + jnp.log(total)


def gradients(tile: Tile, ramp: int, log_sum: jax.Array, d_output: jax.Array, d_dot: jax.Array) -> Gradients:
    """The gradients of one tile, given the log-sum-exp over all tiles, d_output and d_dot = Σ d_output·output."""
    score, mask = _scores(tile), _mask(tile, ramp)
    exact, compute = score.dtype, tile.query.dtype
    # At the closed end of the ramp m is 0 but its derivative is not, and the score there has no bound.
    limit = math.log(float(jnp.finfo(exact).max)) / 2
    exponential = jnp.exp(jnp.minimum(score - log_sum, limit))
    weight = mask * exponential
    d_output = d_output.astype(compute)
    d_weight = jnp.einsum("...CK,...JK->...CJ", d_output, tile.value, preferred_element_type=exact)
    if tile.dropout is None:
        kept = weight
    else:
        keep = _keep(tile)
        kept, d_weight = weight * keep, d_weight * keep
    d_score = (weight * (d_weight - d_dot)).astype(compute)
    d_mask = jnp.where(_on_ramp(tile, ramp), exponential * (d_weight - d_dot), 0)
    d_position = unskew(d_score)
    return Gradients(
        query=jnp.einsum("...CJ,...JK->...CK", d_score, tile.key, preferred_element_type=exact)
        + jnp.einsum("...CY,YK->...CK", d_position, tile.table_YK, preferred_element_type=exact),
        key=jnp.einsum("...CJ,...CK->...JK", d_score, tile.query, preferred_element_type=exact),
        value=jnp.einsum("...CJ,...CK->...JK", kept.astype(compute), d_output, preferred_element_type=exact),
        table_YK=jnp.einsum("...CY,...CK->YK", d_position, tile.query, preferred_element_type=exact),
        z=d_mask.sum(axis=-1, keepdims=True) / ramp,
    )


def skew(by_distance: jax.Array, keys: int) -> jax.Array:
    """[…, C, Y] by distance → […, C, J] by key."""
    *outer, queries, rows = by_distance.shape
    flat = by_distance.reshape(*outer, queries * rows)[..., queries - 1 : -1]
    return flat.reshape(*outer, queries, rows - 1)[..., :keys]


def unskew(by_key: jax.Array) -> jax.Array:
    """[…, C, J] by key → […, C, Y] by distance, 0 at distances that a query does not have: the transpose of `skew`."""
    *outer, queries, keys = by_key.shape
    no_padding = [(0, 0)] * len(outer)
    flat = jnp.pad(by_key, [*no_padding, (0, 0), (0, queries - 1)]).reshape(*outer, queries * (keys + queries - 1))
    return jnp.pad(flat, [*no_padding, (queries - 1, 1)]).reshape(*outer, queries, keys + queries)


def _scores(tile: Tile) -> jax.Array:
    exact = jnp.promote_types(tile.query.dtype, jnp.float32)
    content = jnp.einsum("...CK,...JK->...CJ", tile.query, tile.key, preferred_element_type=exact)
    position = jnp.einsum("...CK,YK->...CY", tile.query, tile.table_YK, preferred_element_type=exact)
    return content + skew(position, tile.key.shape[-2])


def _mask(tile: Tile, ramp: int) -> jax.Array:
    return jnp.where(tile.visible, jnp.clip(_rest(tile, ramp) / ramp, 0, 1), 0)


def _on_ramp(tile: Tile, ramp: int) -> jax.Array:
    # Closed at both ends, as the published derivative is: see span.py.
    rest = _rest(tile, ramp)
    return tile.visible & (rest >= 0) & (rest <= ramp)


def _rest(tile: Tile, ramp: int) -> jax.Array:
    return ramp + tile.z + 1 - tile.distance.astype(tile.z.dtype)


def _keep(tile: Tile) -> jax.Array:
    assert tile.dropout is not None
    return tile.dropout.at(tile.distance).scale().astype(tile.z.dtype)
