"""Adagrad as published: the accumulated squares see the whole gradient, the step sees it clipped per parameter tensor.

    G ← G + g²        step = −lr · c · g / (√G + ε)        c = min(1, clip / (‖g‖ + ε))        ε = 1e-10, G starts at 0

Clipping thus scales the step, not what is accumulated: `optax.chain(clip, adagrad)` is a different optimizer, and so
are optax's defaults (G starts at 0.1, ε inside the root).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from adaptive_span_jax.config import TrainConfig
from adaptive_span_jax.model.transformer import LAYERS

EPSILON = 1e-10  # of the root of G, and of the norm in clipping


class AdagradState(NamedTuple):
    """G, one number per parameter."""

    sum_of_squares: optax.Params


def make_optimizer(train: TrainConfig) -> optax.GradientTransformationExtraArgs:
    """The published optimizer with its schedule. Its `update` takes also `good`, see below."""
    return optax.chain(scale_by_clipped_adagrad(train.clip), optax.scale_by_learning_rate(make_schedule(train)))


def make_schedule(train: TrainConfig) -> Callable[[ArrayLike], jax.Array]:
    """Update n (from 0) uses lr · min(1, (n + 1) / warm-up), and a tenth of lr from `cooldown_start` on."""

    def learning_rate(update: ArrayLike) -> jax.Array:
        progress = (jnp.asarray(update, float) + 1) / max(train.warmup_steps, 1)
        rate = train.learning_rate * jnp.minimum(progress, 1)
        if train.cooldown_start:
            rate = jnp.where(jnp.asarray(update) < train.cooldown_start, rate, rate / 10)
        return rate

    return learning_rate


def scale_by_clipped_adagrad(clip: float) -> optax.GradientTransformationExtraArgs:
    """g → c · g / (√G + ε); for an update that is not `good`, as if every gradient were 0.

    To Adagrad a gradient of 0 is no step at all: parameters and sums stay as they are, to the last bit.
    """

    def init(params: optax.Params) -> AdagradState:
        return AdagradState(jax.tree.map(jnp.zeros_like, params))

    def update(
        gradients: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        good: jax.Array | bool = True,
        **others: Any,
    ) -> tuple[optax.Updates, AdagradState]:
        del params, others

        def step(g: jax.Array, squared_norm: jax.Array, total: jax.Array) -> jax.Array:
            norm = jnp.sqrt(jnp.where(good, squared_norm, 0))
            return jnp.minimum(1.0, clip / (norm + EPSILON)) * g / (jnp.sqrt(total) + EPSILON)

        norms = squared_norms(gradients)
        gradients = jax.tree.map(lambda g: jnp.where(good, g, 0), gradients)
        squares = jax.tree.map(lambda total, g: total + jnp.square(g), state.sum_of_squares, gradients)
        return jax.tree.map(step, gradients, norms, squares), AdagradState(squares)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))


def squared_norms(gradients: optax.Updates) -> optax.Updates:
    """‖g‖² of every tensor. Below the key `layers` every layer's slice counts as a tensor of its own, as published."""

    def squared_norm(path: tuple, gradient: jax.Array) -> jax.Array:
        stacked = path[0].key == LAYERS
        return jnp.sum(jnp.square(gradient), axis=tuple(range(int(stacked), gradient.ndim)), keepdims=True)

    return jax.tree_util.tree_map_with_path(squared_norm, gradients)
