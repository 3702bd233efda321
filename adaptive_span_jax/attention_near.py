"""The near part of per-head attention: distances 1 … W for every head, in tiles of fixed shape.

Queries stand in N chunks of C, and each chunk sees one window of keys, the W before it and its own C:

    keys     [ W from memory ][ chunk 0 ][ chunk 1 ][ chunk 2 ]
    chunk 0  └─────── window 0 ─────────┘
    chunk 1                   └────── window 1 ─────┘              (W = C whenever there is more than one chunk)
"""

import jax
import jax.numpy as jnp

from adaptive_span_jax import position_table, tile
from adaptive_span_jax.attention_inputs import MARGIN, NEAR, InputGradients, Inputs


def forward(inputs: Inputs, ramp: int) -> tile.Running:
    """The softmax over all near keys: arrays [B, H, T, …]."""
    near = _tile(inputs)
    running = tile.accumulate(tile.start(near.z.dtype, near.query.shape), near, ramp)
    return tile.Running(*(_join_chunks(array) for array in running))


def backward(
    inputs: Inputs, ramp: int, log_sum_BHT1: jax.Array, d_output_BHTK: jax.Array, d_dot_BHT1: jax.Array
) -> InputGradients:
    """The near part's share of every gradient."""
    chunk = inputs.chunk
    found = tile.gradients(
        _tile(inputs), ramp, *(_split_chunks(array, chunk) for array in (log_sum_BHT1, d_output_BHTK, d_dot_BHT1))
    )
    context_BJD = _context(inputs)
    compute = context_BJD.dtype
    d_key_BHJK, d_value_BHJK = _unwindow(found.key).astype(compute), _unwindow(found.value).astype(compute)
    furthest = NEAR + chunk - 1
    return InputGradients(
        query_BHTK=_join_chunks(found.query),
        segment_BTD=jnp.einsum("BHTK,DHK->BTD", d_key_BHJK[:, :, NEAR:], inputs.key_DHK)
        + jnp.einsum("BHTK,DHK->BTD", d_value_BHJK[:, :, NEAR:], inputs.value_DHK),
        key_DHK=jnp.einsum("BJD,BHJK->DHK", context_BJD, d_key_BHJK),
        value_DHK=jnp.einsum("BJD,BHJK->DHK", context_BJD, d_value_BHJK),
        table_PK=position_table.add_rows(
            jnp.zeros(inputs.table_PK.shape, found.table_YK.dtype), MARGIN, furthest, found.table_YK
        ),
        z_BHT1=_join_chunks(found.z),
    )


def _tile(inputs: Inputs) -> tile.Tile:
    chunk = inputs.chunk
    keys = NEAR + chunk
    context_BJD = _context(inputs)
    query = _split_chunks(inputs.query_BHTK, chunk)
    chunks = query.shape[2]
    distance = tile.distances(NEAR, chunk, keys)[None, None, None]
    visible = (distance >= 1) & (distance <= min(NEAR, inputs.limit))
    if inputs.filled is not None:
        first = (jnp.arange(chunks) * chunk - NEAR)[None, None, :, None, None]
        visible = visible & (first + jnp.arange(keys)[None, None, None, None, :] >= -inputs.filled)
    dropout = inputs.dropout
    if dropout is not None:
        _, head, number, place, _ = jnp.ogrid[:1, : query.shape[1], :chunks, :chunk, :1]
        dropout = dropout.at(inputs.stream_B[:, None, None, None, None]).at(head).at(number * chunk + place)
    return tile.Tile(
        query=query,
        key=_window(jnp.einsum("BJD,DHK->BHJK", context_BJD, inputs.key_DHK), chunk, chunks),
        value=_window(jnp.einsum("BJD,DHK->BHJK", context_BJD, inputs.value_DHK), chunk, chunks),
        table_YK=position_table.rows(inputs.table_PK, MARGIN, NEAR + chunk - 1, chunk + keys),
        distance=distance,
        visible=visible,
        z=_split_chunks(inputs.z_BHT1, chunk),
        dropout=dropout,
    )


def _context(inputs: Inputs) -> jax.Array:
    """The last W positions of memory, zeros where memory is shorter, and the segment."""
    kept = min(NEAR, inputs.limit)
    memory_BWD = inputs.memory.block(kept, kept).astype(inputs.segment_BTD.dtype)
    memory_BWD = jnp.pad(memory_BWD, [(0, 0), (NEAR - kept, 0), (0, 0)])
    return jnp.concatenate([memory_BWD, inputs.segment_BTD], axis=1)


def _split_chunks(array_BHTX: jax.Array, chunk: int) -> jax.Array:
    streams, heads, length, last = array_BHTX.shape
    return array_BHTX.reshape(streams, heads, length // chunk, chunk, last)


def _join_chunks(array_BHNCX: jax.Array) -> jax.Array:
    streams, heads, chunks, chunk, last = array_BHNCX.shape
    return array_BHNCX.reshape(streams, heads, chunks * chunk, last)


def _window(rows_BHJK: jax.Array, chunk: int, chunks: int) -> jax.Array:
    """[B, H, W + N·C, K] → [B, H, N, W + C, K]."""
    if chunks == 1:
        return rows_BHJK[:, :, None]
    blocks = _split_chunks(rows_BHJK, chunk)
    return jnp.concatenate([blocks[:, :, :-1], blocks[:, :, 1:]], axis=3)


def _unwindow(windows_BHNJK: jax.Array) -> jax.Array:
    """The transpose of `_window`: adds up what the windows say of each row."""
    if windows_BHNJK.shape[2] == 1:
        return windows_BHNJK[:, :, 0]
    before, within = jnp.split(windows_BHNJK, 2, axis=3)
    end, front = [(0, 0)] * 5, [(0, 0)] * 5
    end[2], front[2] = (0, 1), (1, 0)
    return _join_chunks(jnp.pad(before, end) + jnp.pad(within, front))
