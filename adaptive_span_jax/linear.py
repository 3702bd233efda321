"""A matrix product whose gradients are written out, in the layouts that are fastest on a CPU.

Automatic differentiation finds the weight's gradient as the transpose of what is wanted. XLA on CPU then turns the
gradient that comes in, computing all that is fused into it in the order of columns, and turns the result back: together
a tenth of a training step. Elsewhere the two are the same product.
"""

import math

import jax
import jax.numpy as jnp


@jax.custom_vjp
def linear(rows: jax.Array, weight_DE: jax.Array) -> jax.Array:
    """[…, D] times [D, E]: […, E]."""
    return (rows.reshape(-1, weight_DE.shape[0]) @ weight_DE).reshape(*rows.shape[:-1], weight_DE.shape[1])


def _forward(rows: jax.Array, weight_DE: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return linear(rows, weight_DE), (rows, weight_DE)


def _backward(saved: tuple[jax.Array, jax.Array], d_product: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, weight_DE = saved
    count = math.prod(rows.shape[:-1])
    rows_ND, d_product_NE = rows.reshape(count, -1), d_product.reshape(count, -1)
    d_rows_ND = jnp.einsum("NE,DE->ND", d_product_NE, weight_DE)
    return d_rows_ND.reshape(rows.shape), jnp.einsum("ND,NE->DE", rows_ND, d_product_NE)


linear.defvjp(_forward, _backward)
