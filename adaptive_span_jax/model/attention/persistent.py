"""Attention to persistent vectors: N learned key/value pairs per head, which every query sees wherever it stands.

This is the all-attention layer of "Augmenting Self-attention with Persistent Memory" (arXiv:1907.01470). One softmax
covers context and persistent vectors. Any softmax can be computed in parts: `attend` here and `attend` of a path each
return a weighted average and the logarithm of its normaliser, and `merge` weighs the averages by their normalisers.
Dropout acts on weights after normalising, and `merge` is linear in the averages, so dropping before merging is exact.

The forward pass keeps no scores. The backward pass computes them again from the query and the log-sum-exp.
"""

import jax
import jax.numpy as jnp

from adaptive_span_jax.model.dropout import Dropout


def attend(
    query_BTHK: jax.Array, key_HKU: jax.Array, value_HUK: jax.Array, dropout: Dropout | None = None
) -> tuple[jax.Array, jax.Array]:
    """(each head's weighted average of its persistent values: output_BTHK, log Σ exp(score): log_sum_BTH).

    Keys and values are the parameters κ and ν. The published code uses them as κ·√K and ν·√N and scales scores by 1/√K:
    a score is q·κ, without a position term, and the mask is 1.
    """
    return _attend(query_BTHK, key_HKU, value_HUK, dropout)


def join(
    in_context: tuple[jax.Array, jax.Array],
    query_BTHK: jax.Array,
    key_HKU: jax.Array,
    value_HUK: jax.Array,
    dropout: Dropout | None = None,
) -> jax.Array:
    """The average over context and persistent vectors, output_BTHK, given (output_BTHK, log_sum_BTH) of the context."""
    return merge(in_context, attend(query_BTHK, key_HKU, value_HUK, dropout))


def merge(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The average over two sets of keys, given (output_BTHK, log_sum_BTH) over each: output_BTHK."""
    (first_BTHK, first_BTH), (second_BTHK, second_BTH) = first, second
    difference_BTH1 = (first_BTH - second_BTH)[..., None]
    # The sigmoid of a difference neither overflows nor has a non-finite gradient. One minus it would lose digits.
    merged_BTHK = jax.nn.sigmoid(difference_BTH1) * first_BTHK + jax.nn.sigmoid(-difference_BTH1) * second_BTHK
    return merged_BTHK.astype(first_BTHK.dtype)


@jax.custom_vjp
def _attend(
    query_BTHK: jax.Array, key_HKU: jax.Array, value_HUK: jax.Array, dropout: Dropout | None
) -> tuple[jax.Array, jax.Array]:
    return _forward(query_BTHK, key_HKU, value_HUK, dropout)[0]


# Heads come first inside: they are the batch axis of every product, so no score is transposed.
def _forward(
    query_BTHK: jax.Array, key_HKU: jax.Array, value_HUK: jax.Array, dropout: Dropout | None
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    score_HBTU = _scores(query_BTHK, key_HKU)
    top_HBT1 = score_HBTU.max(axis=-1, keepdims=True)
    weight_HBTU = jnp.exp(score_HBTU - top_HBT1)
    total_HBT1 = weight_HBTU.sum(axis=-1, keepdims=True)
    weight_HBTU = _drop(weight_HBTU, dropout).astype(query_BTHK.dtype)
    summed_HBTK = jnp.einsum("HBTU,HUK->HBTK", weight_HBTU, value_HUK, preferred_element_type=total_HBT1.dtype)
    output_BTHK = _heads_third(summed_HBTK * (_value_scale(value_HUK) / total_HBT1)).astype(query_BTHK.dtype)
    log_sum_BTH = _heads_third(top_HBT1 + jnp.log(total_HBT1))[..., 0]
    results = output_BTHK, log_sum_BTH
    return results, (query_BTHK, key_HKU, value_HUK, dropout, *results)


def _backward(residuals: tuple, d_results: tuple[jax.Array, jax.Array]) -> tuple:
    query_BTHK, key_HKU, value_HUK, dropout, output_BTHK, log_sum_BTH = residuals
    d_output_BTHK, d_log_sum_BTH = d_results
    accum_dtype, compute_dtype = log_sum_BTH.dtype, query_BTHK.dtype
    d_dot_BTH = (d_output_BTHK.astype(accum_dtype) * output_BTHK.astype(accum_dtype)).sum(axis=-1) - d_log_sum_BTH
    query_HBTK, log_sum_HBT1, d_dot_HBT1 = (
        jnp.moveaxis(array, 2, 0) for array in (query_BTHK, log_sum_BTH[..., None], d_dot_BTH[..., None])
    )
    d_summed_HBTK = jnp.moveaxis(d_output_BTHK.astype(accum_dtype) * _value_scale(value_HUK), 2, 0)
    d_summed_HBTK = d_summed_HBTK.astype(compute_dtype)

    weight_HBTU = jnp.exp(_scores(query_BTHK, key_HKU) - log_sum_HBT1)
    d_weight_HBTU = jnp.einsum("HBTK,HUK->HBTU", d_summed_HBTK, value_HUK, preferred_element_type=accum_dtype)
    d_score_HBTU = (weight_HBTU * (_drop(d_weight_HBTU, dropout) - d_dot_HBT1)).astype(compute_dtype)
    weight_HBTU = _drop(weight_HBTU, dropout).astype(compute_dtype)
    d_query_HBTK = jnp.einsum("HBTU,HKU->HBTK", d_score_HBTU, key_HKU, preferred_element_type=accum_dtype)
    d_key_HKU = jnp.einsum("HBTK,HBTU->HKU", query_HBTK, d_score_HBTU, preferred_element_type=accum_dtype)
    d_value_HUK = jnp.einsum("HBTU,HBTK->HUK", weight_HBTU, d_summed_HBTK, preferred_element_type=accum_dtype)
    d_query_BTHK = _heads_third(d_query_HBTK).astype(compute_dtype)
    return d_query_BTHK, d_key_HKU.astype(key_HKU.dtype), d_value_HUK.astype(value_HUK.dtype), None


_attend.defvjp(_forward, _backward)


def _scores(query_BTHK: jax.Array, key_HKU: jax.Array) -> jax.Array:
    accum_dtype = jnp.promote_types(query_BTHK.dtype, jnp.float32)
    query_HBTK = jnp.moveaxis(query_BTHK, 2, 0)
    return jnp.einsum("HBTK,HKU->HBTU", query_HBTK, key_HKU, preferred_element_type=accum_dtype)


def _drop(weight_HBTU: jax.Array, dropout: Dropout | None) -> jax.Array:
    if dropout is None:
        return weight_HBTU
    head_H111, _, query_11T1, vector_111U = jnp.ogrid[tuple(slice(size) for size in weight_HBTU.shape)]
    stream_1B11 = dropout.streams(weight_HBTU.shape[1])[None, :, None, None]
    scale_HBTU = dropout.at(stream_1B11).at(head_H111).at(query_11T1).at(vector_111U).scale()
    return weight_HBTU * scale_HBTU.astype(weight_HBTU.dtype)


def _value_scale(value_HUK: jax.Array) -> float:
    return value_HUK.shape[1] ** 0.5


def _heads_third(array_HBTX: jax.Array) -> jax.Array:
    return jnp.moveaxis(array_HBTX, 0, 2)
