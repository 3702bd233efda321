"""The masked softmax of per-head attention, tile by tile, forward and backward.

The forward pass adds each tile of scores to a running softmax. The backward pass carries nothing from tile to tile: it
has the log-sum-exp over all keys, so a tile's weights are m·exp(s − log-sum-exp), and its gradient depends on no other.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_span_jax.model.attention.reference import lowest
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.span import on_ramp, soft_mask


class Running(NamedTuple):
    """A softmax over the keys seen so far."""

    top: jax.Array  # the largest score with a mask above 0, […, C, 1]
    total: jax.Array  # Σ m·exp(s − top), […, C, 1]
    output: jax.Array  # Σ m·exp(s − top)·value, […, C, K]


class Pairs(NamedTuple):
    """Mask and dropout of a tile's pairs of query and key, from arrays that broadcast to […, C, J]."""

    distance: jax.Array
    visible: jax.Array  # False where the pair is not attended to in this tile, whatever the mask
    z: jax.Array  # […, C, 1]
    dropout: Dropout | None  # with stream, head and query already folded in

    def mask(self, ramp: int) -> jax.Array:
        """m_z(x), and 0 where the pair is not visible."""
        return jnp.where(self.visible, soft_mask(self.distance.astype(self.z.dtype), self.z, ramp), 0)

    def on_ramp(self, ramp: int) -> jax.Array:
        """Where the mask has a derivative with respect to z; it is 1/R there."""
        return self.visible & on_ramp(self.distance.astype(self.z.dtype), self.z, ramp)

    def drop(self, weight: jax.Array) -> jax.Array:
        """The weights after dropout."""
        if self.dropout is None:
            return weight
        return weight * self.dropout.at(self.distance).scale().astype(weight.dtype)


class SoftmaxGradients(NamedTuple):
    """What the backward pass of a tile continues with."""

    weight: jax.Array  # after dropout
    d_score: jax.Array
    d_z: jax.Array  # […, C, 1]


def start(score_dtype: jnp.dtype, shape: tuple[int, ...]) -> Running:
    """The softmax over no keys, for an output of this shape."""
    rows = (*shape[:-1], 1)
    return Running(
        jnp.full(rows, lowest(score_dtype), score_dtype), jnp.zeros(rows, score_dtype), jnp.zeros(shape, score_dtype)
    )


def accumulate(
    running: Running, score: jax.Array, pairs: Pairs, ramp: int, weigh: Callable[[jax.Array], jax.Array]
) -> Running:
    """The softmax over the keys seen so far and those of one more tile; `weigh` sums the tile's values by weight."""
    mask = pairs.mask(ramp)
    top = jnp.maximum(running.top, jnp.max(score, axis=-1, keepdims=True, where=mask > 0, initial=-jnp.inf))
    # Scores outside the mask may exceed `top`. Without the cap, 0 · ∞ would give NaN.
    weight = mask * jnp.exp(jnp.minimum(score - top, 0))
    earlier = jnp.exp(running.top - top)
    total = running.total * earlier + weight.sum(axis=-1, keepdims=True)
    # Dropout acts after normalising, so the total counts dropped weights too.
    return Running(top, total, running.output * earlier + weigh(pairs.drop(weight)))


def finish(running: Running) -> tuple[jax.Array, jax.Array]:
    """(the weighted average of the values, the log-sum-exp); the average over no keys at all is 0."""
    total = jnp.where(running.total > 0, running.total, 1)
    return running.output / total, running.top + jnp.log(total)


def gradients(
    score: jax.Array, pairs: Pairs, ramp: int, log_sum: jax.Array, d_weight: jax.Array, d_dot: jax.Array
) -> SoftmaxGradients:
    """The gradients of one tile, given those of its weights after dropout and `d_dot`.

    `d_dot` is Σ d_output·output − d_log_sum.
    """
    # Where the ramp ends, m is 0 but its derivative is not, and the score there is unbounded.
    cap = math.log(float(jnp.finfo(score.dtype).max)) / 2
    exponential = jnp.exp(jnp.minimum(score - log_sum, cap))
    weight = pairs.mask(ramp) * exponential
    d_log_weight = pairs.drop(d_weight) - d_dot
    d_mask = jnp.where(pairs.on_ramp(ramp), exponential * d_log_weight, 0)
    return SoftmaxGradients(pairs.drop(weight), weight * d_log_weight, d_mask.sum(axis=-1, keepdims=True) / ramp)
