"""What a model costs per predicted token: the paper's estimate, what we execute, what the published algorithm would.

Counts are multiply-adds of the forward pass; like the paper's they leave out embeddings and the output layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_span_jax.attention_inputs import FAR, NEAR
from adaptive_span_jax.config import Config
from adaptive_span_jax.span import reach

# The published code computes all heads of a layer at its longest span, rounded up to a multiple of this.
PUBLISHED_TRIM = 64


class Cost(NamedTuple):
    """What one step's forward pass costs at its spans."""

    far_tiles: jax.Array  # how many tiles the far part computes for each stream, over all heads and layers
    executed: jax.Array  # multiply-adds per token
    published: jax.Array  # multiply-adds per token of the published algorithm


def cost(config: Config, furthest_z_LH: jax.Array) -> Cost:
    """The cost at these spans; where z differs between tokens, each head's largest counts."""
    _, tiles_LH = far_tiles_LH(config, furthest_z_LH)
    executed, published = executed_flops(config, furthest_z_LH), published_flops(config, furthest_z_LH)
    return Cost(tiles_LH.sum(), executed, published)


def paper_flops(config: Config, average_span: float) -> float:
    """The paper's "FLOPS": multiply-adds per predicted token, L·(4d² + 2·d·FF + 2·span·d)."""
    sizes = config.model
    projections, feedforward = 4 * sizes.width**2, 2 * sizes.width * sizes.feedforward
    return sizes.layers * (projections + feedforward + 2 * average_span * sizes.width)


def far_tiles_LH(config: Config, z_LH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(key blocks projected, tiles computed) by each head's far part per step: the loops of attention_far.py."""
    length, limit = config.train.segment, config.span.limit
    chunk = min(NEAR, length)
    padded = -(-length // chunk) * chunk
    queries, size = FAR if padded % FAR == 0 else chunk, min(FAR, limit)
    reach_LH1 = reach(z_LH, config.span.ramp, limit)[..., None]

    memory = jnp.arange(-(-limit // size))
    segment = jnp.arange(max(-(-(padded - 1 - NEAR) // queries), 0))
    first = jnp.concatenate([-jnp.minimum((memory + 1) * size, limit), segment * queries])[None, None, :]
    rows = jnp.concatenate([jnp.full_like(memory, size), jnp.full_like(segment, queries)])[None, None, :]
    in_segment = jnp.concatenate([jnp.zeros_like(memory, bool), jnp.ones_like(segment, bool)])[None, None, :]
    number = jnp.concatenate([memory, segment])[None, None, :]
    read = (reach_LH1 > NEAR) & (in_segment | (number < -(-reach_LH1 // size)))
    earliest = jnp.maximum(first + NEAR + 1, 0) // queries
    latest = jnp.minimum(first + rows - 1 + reach_LH1, padded - 1) // queries
    tiles = jnp.where(read, jnp.maximum(latest + 1 - earliest, 0), 0)
    return read.sum(axis=-1), tiles.sum(axis=-1)


def executed_flops(config: Config, z_LH: jax.Array) -> jax.Array:
    """Multiply-adds per token of our forward pass at these spans."""
    sizes, length = config.model, config.train.segment
    width, head_width = sizes.width, config.head_width
    chunk = min(NEAR, length)
    queries, keys = FAR if length % FAR == 0 else chunk, min(FAR, config.span.limit)
    near = 2 * width**2 * (length + NEAR) / length + width * (2 * (NEAR + chunk) + NEAR)
    blocks_LH, tiles_LH = far_tiles_LH(config, z_LH)
    block = keys * width * 2 * head_width
    tile = queries * head_width * (2 * keys + queries + keys)
    far = (blocks_LH.sum() * block + tiles_LH.sum() * float(tile)) / length
    return sizes.layers * (_same_for_all(config) + near) + far


def published_flops(config: Config, z_LH: jax.Array) -> jax.Array:
    """Multiply-adds per token of the published algorithm at these spans: every head pays the longest of its layer."""
    width, length = config.model.width, config.train.segment
    longest_L = jnp.ceil(z_LH.max(axis=1)) + config.span.ramp
    longest_L = jnp.minimum(jnp.ceil(longest_L / PUBLISHED_TRIM) * PUBLISHED_TRIM, config.span.limit)
    context_L = longest_L + length
    attention_L = 2 * width**2 * context_L / length + width * (2 * context_L + longest_L)
    return (_same_for_all(config) + attention_L).sum()


def _same_for_all(config: Config) -> int:
    """A layer's query and output projections and its feed-forward network."""
    width = config.model.width
    return 2 * width**2 + 2 * width * config.model.feedforward
