"""Multiply-adds per predicted token: by the paper's estimate, as executed here, and by the published algorithm.

Counts are for the forward pass. As in the paper, embeddings and the output layer are not counted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_span_jax.config import Config
from adaptive_span_jax.model.attention.far_tile import position_chunks
from adaptive_span_jax.model.attention.fused.sizes import BLOCK, walk
from adaptive_span_jax.model.attention.inputs import NEAR, FarShape
from adaptive_span_jax.model.span import reach
from adaptive_span_jax.runtime import sharding

# The published code computes all heads of a layer with the longest span, rounded up to a multiple of this.
PUBLISHED_TRIM = 64


class Cost(NamedTuple):
    """The cost of one forward pass."""

    far_tiles: jax.Array  # tiles per stream that heads beyond the shortest reach compute, over all layers
    executed: jax.Array  # multiply-adds per token
    published: jax.Array  # multiply-adds per token of the published algorithm


def cost(config: Config, furthest_z_LH: jax.Array, path: str) -> Cost:
    """The cost at these spans of a path (attention/paths.py), given each head's largest z over tokens."""
    if path == "fused":
        steps_LH, full_LH = walk(furthest_z_LH, furthest_z_LH, config.span.ramp, config.span.limit)
        tiles = jnp.where(full_LH < 0, 0, steps_LH).sum() * (config.train.segment // BLOCK)
        executed = fused_flops(config, furthest_z_LH)
    else:
        far = FarShape.on(sharding.platform())
        tiles = far_tiles(config, furthest_z_LH, far)[1].sum()
        executed = executed_flops(config, furthest_z_LH, far)
    return Cost(tiles, executed, published_flops(config, furthest_z_LH))


def paper_flops(config: Config, average_span: float) -> float:
    """The paper's "FLOPS": multiply-adds per predicted token, L·(4d² + 2·d·FF + 2·span·d).

    N persistent vectors per head, counted like N more positions of the span, replace the feed-forward network.
    """
    sizes = config.model
    return sizes.layers * (4 * sizes.width**2 + _inner(config) + 2 * average_span * sizes.width)


def executed_flops(config: Config, z_LH: jax.Array, far: FarShape) -> jax.Array:
    """Multiply-adds per token of a forward pass on the path per_head, with far tiles of this shape."""
    sizes, length = config.model, config.train.segment
    width = sizes.width
    chunk, padded = _padded(length)
    queries = far.queries(padded)
    near = 2 * width**2 * (NEAR + padded) + padded * width * (2 * (NEAR + chunk) + NEAR)
    rows_X, tiles_LHX = far_tiles(config, z_LH, far)
    rows = rows_X[None, None, :].astype(jnp.float32)
    projected = rows * width * 2 * config.head_width
    # A tile's products: scores and values, and for each chunk of queries positions at all distances in it.
    tile = queries * config.head_width * (2 * rows + rows + queries // position_chunks(queries))
    distant = jnp.where(tiles_LHX > 0, projected + tiles_LHX * tile, 0).sum()
    return sizes.layers * (_dense(config) + near / length) + distant / length


def fused_flops(config: Config, z_LH: jax.Array) -> jax.Array:
    """Multiply-adds per token of a forward pass of the fused kernels, without lanes that only pad."""
    length, width, head_width = config.train.segment, config.model.width, config.head_width
    steps_LH, full_LH = walk(z_LH, z_LH, config.span.ramp, config.span.limit)
    tile = length * BLOCK * head_width  # of all query blocks
    # A step has three tiles: position scores, content scores, values. Three more set up and finish what steps carry.
    # Each step but the first needs a block of memory; one more is projected ahead, and not used.
    long_LH = (3 * steps_LH + 3) * tile + steps_LH * BLOCK * width * 2 * head_width
    heads = jnp.where(full_LH < 0, 3 * tile, long_LH).sum()
    projected = 2 * width**2 * (BLOCK + length)
    return config.model.layers * (_dense(config) + projected / length) + heads / length


def far_tiles(config: Config, z_LH: jax.Array, far: FarShape) -> tuple[jax.Array, jax.Array]:
    """(rows_X of the X key blocks, tiles_LHX that each head computes of them), as in the loops of attention/far.py.

    As there, the heads of a layer are sorted by their reach, furthest first.
    """
    limit = config.span.limit
    _, padded = _padded(config.train.segment)
    queries, size = far.queries(padded), far.keys(limit)
    reach_LH = jnp.sort(reach(z_LH, config.span.ramp, limit), descending=True)
    leader_H, furthest_H = _leaders(far, reach_LH.shape[1])
    leader_LH1, furthest_LH1 = (reach_LH[:, head_H][..., None] for head_H in (leader_H, furthest_H))

    memory = jnp.arange(-(-limit // size))
    segment = jnp.arange(max(-(-(padded - 1 - NEAR) // queries), 0))
    rows_X = jnp.concatenate([jnp.full_like(memory, size), jnp.full_like(segment, queries)])
    first_X = jnp.concatenate([-jnp.minimum((memory + 1) * size, limit), segment * queries])
    # Every block of the segment is read, but a block of memory only if the head reaches it.
    before_X = jnp.concatenate([memory * size, jnp.zeros_like(segment)])
    rows, first, before = (array[None, None, :] for array in (rows_X, first_X, before_X))
    read_LHX = (leader_LH1 > NEAR) & (leader_LH1 > before)
    earliest = jnp.maximum(first + NEAR + 1, 0) // queries
    latest_LHX = jnp.minimum(first + rows - 1 + furthest_LH1, padded - 1) // queries
    return rows_X, jnp.where(read_LHX, jnp.maximum(latest_LHX + 1 - earliest, 0), 0)


def _leaders(far: FarShape, heads: int) -> tuple[list[int], list[int]]:
    """For each of the sorted heads: the head whose key blocks it computes too, and the head whose query blocks.

    The former is the first that is in its group and in no smaller one, the latter the first of those read together.
    """
    sizes = far.groups(heads)
    furthest_H = [head - head % sizes[0] for head in range(heads)]
    leader_H = [
        first + max(size for size in (*sizes, 0) if size <= head - first) for head, first in enumerate(furthest_H)
    ]
    return leader_H, furthest_H


def published_flops(config: Config, z_LH: jax.Array) -> jax.Array:
    """Multiply-adds per token of the published algorithm: every head costs as much as the longest of its layer."""
    width, length = config.model.width, config.train.segment
    longest_L = jnp.ceil(z_LH.max(axis=1)) + config.span.ramp
    longest_L = jnp.minimum(jnp.ceil(longest_L / PUBLISHED_TRIM) * PUBLISHED_TRIM, config.span.limit)
    context_L = longest_L + length
    attention_L = 2 * width**2 * context_L / length + width * (2 * context_L + longest_L)
    return (_dense(config) + attention_L).sum()


def _padded(length: int) -> tuple[int, int]:
    """(queries in a near tile, the segment's length padded to whole near tiles)."""
    chunk = min(NEAR, length)
    return chunk, -(-length // chunk) * chunk


def _dense(config: Config) -> int:
    """A layer's query and output projections and its feed-forward network or persistent vectors."""
    return 2 * config.model.width**2 + _inner(config)


def _inner(config: Config) -> int:
    """The feed-forward network of a layer, or what replaces it: scores and averages of persistent vectors."""
    return 2 * config.model.width * (config.model.persistent or config.model.feedforward)
