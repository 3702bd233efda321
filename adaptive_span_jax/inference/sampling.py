"""Samples a token from logits. Temperature, top-k and top-p are traced, so changing them does not recompile."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


class Sampling(NamedTuple):
    """How the next token is sampled."""

    temperature: jax.Array | float = 1.0  # 0: always the most likely
    top_k: jax.Array | int = 0  # only the k most likely; 0: all
    top_p: jax.Array | float = 1.0  # only the most likely whose probabilities sum to this


def sample(logits_BV: ArrayLike, key: jax.Array, sampling: Sampling) -> jax.Array:
    """One token for every stream: token_B."""
    logits_BV = jnp.asarray(logits_BV)
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    scaled_BV = sorted_BV / jnp.where(sampling.temperature > 0, sampling.temperature, 1)
    probability_BV = jax.nn.softmax(scaled_BV, axis=-1)
    before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV  # the probability of all more likely tokens
    rank_1V = jnp.arange(logits_BV.shape[-1])[None, :]
    last_rank = jnp.where(sampling.top_k > 0, sampling.top_k, logits_BV.shape[-1])
    last_rank = jnp.where(sampling.temperature > 0, last_rank, 1)
    allowed_BV = (rank_1V == 0) | ((rank_1V < last_rank) & (before_BV < sampling.top_p))
    chosen_B = jax.random.categorical(key, jnp.where(allowed_BV, scaled_BV, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order_BV, chosen_B[:, None], axis=-1)[:, 0]
