"""Operations on one tile, [128 queries, 128 keys], that both kernels use."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from adaptive_span_jax.model.attention.fused.sizes import BLOCK

TILE = (BLOCK, BLOCK)
_SUBLANES = 8


def iota(axis: int, shape: tuple[int, int] = TILE) -> jax.Array:
    """The index along an axis."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def in_newer_block() -> jax.Array:
    """Which cells of a step's tile belong to the newer of its two key blocks: j < c."""
    return iota(1) < iota(0)


def distances() -> jax.Array:
    """The distance of every cell, 1 … 128 in step 0; each further step adds 128."""
    return jnp.where(in_newer_block(), 0, BLOCK) + iota(0) - iota(1)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a · b, accumulated in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def dot_t(a: jax.Array, b: jax.Array) -> jax.Array:
    """a · bᵀ, accumulated in float32."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def skew(by_distance: jax.Array, interpret: bool) -> jax.Array:
    """Row c rolled right by c: by distance, the furthest first → by key."""
    if interpret:  # there a strided roll becomes 128 slices, too many for XLA's compiler
        return jnp.take_along_axis(by_distance, (iota(1) - iota(0)) % BLOCK, axis=1)
    return pltpu.roll(by_distance, 0, 1, stride=1, stride_axis=0)


def unskew_flipped(by_key: jax.Array, interpret: bool) -> jax.Array:
    """The transpose of `skew`, row c rolled left by c, with rows in the order of `flip`.

    The hardware rolls only by amounts that grow from row to row, so every 8 rows are flipped before. What reads the
    result contracts over its rows or flips them back once per head, not once per step.
    """
    if interpret:
        return flip(jnp.take_along_axis(by_key, (iota(1) + iota(0)) % BLOCK, axis=1))
    flipped = flip(by_key)
    rolled = [
        pltpu.roll(flipped[row : row + _SUBLANES], (BLOCK - row - _SUBLANES + 1) % BLOCK, 1, stride=1, stride_axis=0)
        for row in range(0, BLOCK, _SUBLANES)
    ]
    return jnp.concatenate(rolled)


def flip(tile: jax.Array) -> jax.Array:
    """The tile with the rows of each group of 8 in reverse order; its own inverse."""
    backwards = _SUBLANES - 1 - iota(0, (_SUBLANES, BLOCK))
    groups = (tile[row : row + _SUBLANES] for row in range(0, BLOCK, _SUBLANES))
    return jnp.concatenate([jnp.take_along_axis(group, backwards, axis=0) for group in groups])


def column(row: jax.Array) -> jax.Array:
    """[1, 128] → a tile whose row c holds entry c in every lane."""
    return jnp.transpose(jnp.broadcast_to(row, TILE))


def row(column: jax.Array) -> jax.Array:
    """The inverse of `column`, also for [128, 1]."""
    return jnp.sum(jnp.where(iota(0) == iota(1), column, 0.0), axis=0, keepdims=True)
