"""Logits → a token: temperature, top-k and top-p, all of them values, so that changing them compiles nothing again."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


class Sampling(NamedTuple):
    """How the next token is drawn."""

    temperature: jax.Array | float = 1.0  # 0: always the likeliest
    top_k: jax.Array | int = 0  # only among the k likeliest; 0: all
    top_p: jax.Array | float = 1.0  # only among the likeliest that together have this probability


def sample(logits_BV: ArrayLike, key: jax.Array, how: Sampling) -> jax.Array:
    """One token for every stream: token_B."""
    logits_BV = jnp.asarray(logits_BV)
    order_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, axis=-1)
    scaled_BV = sorted_BV / jnp.where(how.temperature > 0, how.temperature, 1)
    share_BV = jax.nn.softmax(scaled_BV, axis=-1)
    likelier_BV = jnp.cumsum(share_BV, axis=-1) - share_BV  # the probability of all tokens before this one
    rank_1V = jnp.arange(logits_BV.shape[-1])[None, :]
    last_rank = jnp.where(how.top_k > 0, how.top_k, logits_BV.shape[-1])
    last_rank = jnp.where(how.temperature > 0, last_rank, 1)
    allowed_BV = (rank_1V == 0) | ((rank_1V < last_rank) & (likelier_BV < how.top_p))
    chosen_B = jax.random.categorical(key, jnp.where(allowed_BV, scaled_BV, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order_BV, chosen_B[:, None], axis=-1)[:, 0]
