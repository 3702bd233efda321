"""The near part of per-head attention: distances 1 … W for every head, in tiles of fixed shape.

Queries are cut into N chunks of C. Each chunk sees one window of keys, the W before it and its own C:

    keys     [ W from memory ][ chunk 0 ][ chunk 1 ][ chunk 2 ]
    chunk 0  └─────── window 0 ─────────┘
    chunk 1                   └────── window 1 ─────┘              (W = C whenever there is more than one chunk)

Query c sees the W keys c … c + W − 1 of its window: a band of the tile [C, W + C] (skew.py). Everything is computed by
key, including the masked half beside the band. Leaving that half out would take a rearrangement before and after every
product, which on a CPU costs more than it saves. Only products with the position table are by distance, [C, W].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_span_jax.model.attention import online_softmax, skew
from adaptive_span_jax.model.attention.inputs import NEAR, Inputs


class NearGradients(NamedTuple):
    """The near part's share of the gradients, up to the projections of keys and values."""

    query_BHTK: jax.Array
    key_BJHK: jax.Array
    value_BJHK: jax.Array
    table_WK: jax.Array  # of the distances W … 1
    z_BHT1: jax.Array


def context(inputs: Inputs) -> jax.Array:
    """The hidden states that near keys come from: the last W of memory, after zeros if S < W, and the segment."""
    kept = min(NEAR, inputs.limit)
    memory_BWD = inputs.memory.block(kept, kept).astype(inputs.segment_BTD.dtype)
    memory_BWD = jnp.pad(memory_BWD, [(0, 0), (NEAR - kept, 0), (0, 0)])
    return jnp.concatenate([memory_BWD, inputs.segment_BTD], axis=1)


def forward(
    inputs: Inputs, ramp: int, key_BHJK: jax.Array, value_BHJK: jax.Array
) -> tuple[online_softmax.Running, jax.Array]:
    """(the softmax over all near keys, their score_BHTJ)."""
    query = _split_chunks(inputs.query_BHTK, inputs.chunk)
    accum_dtype = inputs.z_BHT1.dtype
    key, value = (_window(rows, inputs.chunk) for rows in (key_BHJK, value_BHJK))
    content = jnp.einsum("BHNCK,BHNJK->BHNCJ", query, key, preferred_element_type=accum_dtype)
    position = jnp.einsum("BHNCK,WK->BHNCW", query, _table(inputs), preferred_element_type=accum_dtype)
    score = content + skew.band_by_key(position)

    def weigh(weight: jax.Array) -> jax.Array:
        return jnp.einsum("BHNCJ,BHNJK->BHNCK", weight.astype(value.dtype), value, preferred_element_type=accum_dtype)

    running = online_softmax.accumulate(
        online_softmax.start(accum_dtype, query.shape), score, _pairs(inputs), ramp, weigh
    )
    return online_softmax.Running(*(_join_chunks(array) for array in running)), _join_chunks(score)


def backward(
    inputs: Inputs,
    ramp: int,
    key_BHJK: jax.Array,
    value_BHJK: jax.Array,
    score_BHTJ: jax.Array,
    log_sum_BHT1: jax.Array,
    d_output_BHTK: jax.Array,
    d_dot_BHT1: jax.Array,
) -> NearGradients:
    """The near part's share of every gradient."""
    chunk, compute_dtype = inputs.chunk, key_BHJK.dtype
    query, score, log_sum, d_output, d_dot = (
        _split_chunks(array, chunk)
        for array in (inputs.query_BHTK, score_BHTJ, log_sum_BHT1, d_output_BHTK.astype(compute_dtype), d_dot_BHT1)
    )
    key, value = (_window(rows, chunk) for rows in (key_BHJK, value_BHJK))
    accum_dtype = score.dtype
    d_weight = jnp.einsum("BHNCK,BHNJK->BHNCJ", d_output, value, preferred_element_type=accum_dtype)
    grads = online_softmax.gradients(score, _pairs(inputs), ramp, log_sum, d_weight, d_dot)
    d_score, weight = grads.d_score.astype(compute_dtype), grads.weight.astype(compute_dtype)
    d_position = skew.band_by_distance(d_score)
    d_query = jnp.einsum("BHNCJ,BHNJK->BHNCK", d_score, key, preferred_element_type=accum_dtype)
    d_query += jnp.einsum("BHNCW,WK->BHNCK", d_position, _table(inputs), preferred_element_type=accum_dtype)
    return NearGradients(
        query_BHTK=_join_chunks(d_query),
        key_BJHK=_unwindow(jnp.einsum("BHNCJ,BHNCK->BHNJK", d_score, query, preferred_element_type=accum_dtype)),
        value_BJHK=_unwindow(jnp.einsum("BHNCJ,BHNCK->BHNJK", weight, d_output, preferred_element_type=accum_dtype)),
        table_WK=jnp.einsum("BHNCW,BHNCK->BHWK", d_position, query, preferred_element_type=accum_dtype).sum(
            axis=(0, 1)
        ),
        z_BHT1=_join_chunks(grads.d_z),
    )


def _table(inputs: Inputs) -> jax.Array:
    return skew.table_rows(inputs.table_PK, inputs.far.margin, NEAR, NEAR)


def _pairs(inputs: Inputs) -> online_softmax.Pairs:
    chunk, heads = inputs.chunk, inputs.query_BHTK.shape[1]
    chunks = inputs.query_BHTK.shape[2] // chunk
    _, head, number, place, _ = jnp.ogrid[:1, :heads, :chunks, :chunk, :1]
    query = number * chunk + place
    distance = NEAR + place - jnp.arange(NEAR + chunk)[None, None, None, None, :]
    visible = (distance >= 1) & (distance <= min(NEAR, inputs.limit))
    if inputs.valid_length is not None:
        visible = visible & (distance <= inputs.valid_length + query)
    dropout = inputs.dropout
    if dropout is not None:
        dropout = dropout.at(inputs.stream_B[:, None, None, None, None]).at(head).at(query)
    return online_softmax.Pairs(distance, visible, _split_chunks(inputs.z_BHT1, chunk), dropout)


def _split_chunks(array_BHTX: jax.Array, chunk: int) -> jax.Array:
    streams, heads, length, last = array_BHTX.shape
    return array_BHTX.reshape(streams, heads, length // chunk, chunk, last)


def _join_chunks(array_BHNCX: jax.Array) -> jax.Array:
    streams, heads, chunks, chunk, last = array_BHNCX.shape
    return array_BHNCX.reshape(streams, heads, chunks * chunk, last)


def _window(rows_BHJK: jax.Array, chunk: int) -> jax.Array:
    """[B, H, W + N·C, K] → [B, H, N, W + C, K]."""
    if rows_BHJK.shape[2] == NEAR + chunk:
        return rows_BHJK[:, :, None]
    blocks = _split_chunks(rows_BHJK, chunk)
    return jnp.concatenate([blocks[:, :, :-1], blocks[:, :, 1:]], axis=3)


def _unwindow(windows_BHNJK: jax.Array) -> jax.Array:
    """The transpose of `_window`, with heads after rows: each row gets the sum over the windows it is in."""
    if windows_BHNJK.shape[2] == 1:
        return jnp.moveaxis(windows_BHNJK[:, :, 0], 1, 2)
    before, within = jnp.split(windows_BHNJK, 2, axis=3)
    end, front = [(0, 0)] * 5, [(0, 0)] * 5
    end[2], front[2] = (0, 1), (1, 0)
    return jnp.moveaxis(_join_chunks(jnp.pad(before, end) + jnp.pad(within, front)), 1, 2)
