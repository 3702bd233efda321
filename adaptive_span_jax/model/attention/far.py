"""The far part of per-head attention: distances beyond W, for the heads that reach them and only as far as they do.

Heads that reach beyond W are processed one by one. A head reads key blocks, first those of memory from the newest to
the oldest it reaches, then those of the segment. Each block is projected for this head only, and is read by the query
blocks within reach. Loop bounds are values that depend on the spans: cost follows the spans, and nothing is recompiled.

    memory …│ block 1 │ block 0 ║ block 0 │ block 1 │ segment
             ◄──────── reach ───── query

Within one iteration, the shards of streams (see `Inputs.shards`) are independent of each other.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from adaptive_span_jax.model.attention import far_tile, online_softmax, skew
from adaptive_span_jax.model.attention.inputs import NEAR, InputGradients, Inputs, split
from adaptive_span_jax.model.span import reach

Carry = TypeVar("Carry")


class _Block(NamedTuple):
    """A block of keys, read by one head. E: the head's key and value side by side."""

    head: jax.Array
    reach: jax.Array  # of the head
    hidden_BJD: jax.Array
    projected_BJE: jax.Array
    first: jax.Array  # position of its first row; the segment starts at 0
    end: jax.Array  # rows from this position on are read with another block


def forward(
    inputs: Inputs, shards: list[Inputs], ramp: int, near: list[online_softmax.Running]
) -> list[online_softmax.Running]:
    """Each shard's softmax over near and far keys, given that over the near ones."""
    size = _queries(inputs)

    def read_block(block: _Block, running: list[online_softmax.Running]) -> list[online_softmax.Running]:
        def read_queries(number: jax.Array, running: list[online_softmax.Running]) -> list[online_softmax.Running]:
            after = []
            for shard, part, projected in zip(shards, running, split(block.projected_BJE, len(shards)), strict=True):
                partial = online_softmax.Running(*(_cut(array, block.head, number, size) for array in part))
                partial = far_tile.accumulate(partial, _tile(shard, block, projected, number), ramp)
                after.append(
                    online_softmax.Running(
                        *(_paste(*pair, block.head, number) for pair in zip(part, partial, strict=True))
                    )
                )
            return after

        return _over_queries(inputs, block, read_queries, running)

    def read_head(number: jax.Array, running: list[online_softmax.Running]) -> list[online_softmax.Running]:
        head = order_H[number]
        running = _over_memory(inputs, head, reach_H[head], read_block, running)
        return _over_segment(inputs, head, reach_H[head], read_block, running)

    reach_H = _reach(inputs, ramp)
    order_H, count = _far_heads(reach_H)
    return jax.lax.fori_loop(0, count, read_head, near)


def backward(
    inputs: Inputs,
    shards: list[Inputs],
    ramp: int,
    log_sum: list[jax.Array],
    d_output: list[jax.Array],
    d_dot: list[jax.Array],
    near: InputGradients,
) -> InputGradients:
    """The gradients of near and far part together, given those of the near part."""
    size = _queries(inputs)
    accum_dtype, compute_dtype = d_dot[0].dtype, inputs.segment_BTD.dtype
    width = inputs.query_BHTK.shape[-1]

    def read_block(block: _Block, carry: tuple, *, in_segment: bool) -> tuple:
        d_weights_ED, d_segment_BTD, d_query, d_z, d_table_PK = carry

        def read_queries(number: jax.Array, carry: tuple) -> tuple:
            d_query, d_z, d_table_PK, d_projected, scratch = carry
            furthest = number * size + size - 1 - block.first
            after: tuple[list, list, list, list] = ([], [], [], [])
            for index, (shard, projected) in enumerate(
                zip(shards, split(block.projected_BJE, len(shards)), strict=True)
            ):
                residuals = (_cut(array[index], block.head, number, size) for array in (log_sum, d_output, d_dot))
                tile = _tile(shard, block, projected, number)
                grads, used = far_tile.gradients(tile, ramp, *residuals, scratch=scratch[index])
                d_table_PK = skew.add_to_table(d_table_PK, inputs.far.margin, furthest, grads.table_YK)
                for old, new, done in ((d_query, grads.query_BCK, after[0]), (d_z, grads.z_BC1, after[1])):
                    summed = _cut(old[index], block.head, number, size) + new
                    done.append(_paste(old[index], summed, block.head, number))
                after[2].append(d_projected[index] + jnp.concatenate([grads.key_BJK, grads.value_BJK], axis=-1))
                after[3].append(used)
            return after[0], after[1], d_table_PK, after[2], after[3]

        zeros = [jnp.zeros(part.shape, accum_dtype) for part in split(block.projected_BJE, len(shards))]
        scratch = [skew.make_scratch(part.shape[0], size, part.shape[1], compute_dtype) for part in zeros]
        carry = (d_query, d_z, d_table_PK, zeros, scratch)
        carry = _over_queries(inputs, block, read_queries, carry)
        d_query, d_z, d_table_PK, d_projected, _ = carry
        d_projected_BJE = jnp.concatenate(d_projected).astype(compute_dtype)
        d_weights_ED += jnp.einsum("BJE,BJD->ED", d_projected_BJE, block.hidden_BJD, preferred_element_type=accum_dtype)
        if in_segment:
            d_hidden_BJD = jnp.einsum("BJE,DE->BJD", d_projected_BJE, _weights(inputs, block.head))
            old = jax.lax.dynamic_slice_in_dim(d_segment_BTD, block.first, d_hidden_BJD.shape[1], axis=1)
            d_segment_BTD = jax.lax.dynamic_update_slice_in_dim(d_segment_BTD, old + d_hidden_BJD, block.first, axis=1)
        return d_weights_ED, d_segment_BTD, d_query, d_z, d_table_PK

    def read_head(number: jax.Array, carry: tuple) -> tuple:
        head = order_H[number]
        d_key_DHK, d_value_DHK, *others = carry
        inner = (jnp.zeros((2 * width, d_key_DHK.shape[0]), accum_dtype), *others)
        for over, in_segment in ((_over_memory, False), (_over_segment, True)):
            inner = over(inputs, head, reach_H[head], lambda b, c, s=in_segment: read_block(b, c, in_segment=s), inner)
        d_weights_ED, *others = inner
        d_key_DK, d_value_DK = jnp.split(d_weights_ED.T, 2, axis=1)
        return _add(d_key_DHK, d_key_DK, head), _add(d_value_DHK, d_value_DK, head), *others

    reach_H = _reach(inputs, ramp)
    order_H, count = _far_heads(reach_H)
    carry = (
        near.key_DHK,
        near.value_DHK,
        near.segment_BTD,
        split(near.query_BHTK, len(shards)),
        split(near.z_BHT1, len(shards)),
        near.table_PK,
    )
    carry = jax.lax.fori_loop(0, count, read_head, carry)
    d_key_DHK, d_value_DHK, d_segment_BTD, d_query, d_z, d_table_PK = carry
    return InputGradients(
        jnp.concatenate(d_query), d_segment_BTD, d_key_DHK, d_value_DHK, d_table_PK, jnp.concatenate(d_z)
    )


def _reach(inputs: Inputs, ramp: int) -> jax.Array:
    """Each head's reach, the largest over its tokens."""
    return reach(inputs.z_BHT1.max(axis=(0, 2, 3)), ramp, inputs.limit)


def _far_heads(reach_H: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the heads, those that reach beyond W first; how many those are)."""
    near_H = reach_H <= NEAR
    return jnp.argsort(near_H), (~near_H).sum()


def _queries(inputs: Inputs) -> int:
    """The number of queries in a far tile."""
    return inputs.far.queries(inputs.segment_BTD.shape[1])


def _over_memory(
    inputs: Inputs, head: jax.Array, reach: jax.Array, read: Callable[[_Block, Carry], Carry], carry: Carry
) -> Carry:
    """`carry` after `read` has seen the memory blocks that a head reaches, newest first."""
    size = inputs.far.keys(inputs.limit)
    count = -(-reach // size)
    weights_DE = _weights(inputs, head)

    def body(number: jax.Array, carry: Carry) -> Carry:
        # The oldest block starts where memory does. Rows that it shares with the block before are masked by `end`.
        back = jnp.minimum((number + 1) * size, inputs.limit)
        hidden_BJD = inputs.memory.block(back, size).astype(weights_DE.dtype)
        return read(_Block(head, reach, hidden_BJD, _project(hidden_BJD, weights_DE), -back, -number * size), carry)

    return jax.lax.fori_loop(0, count, body, carry)


def _over_segment(
    inputs: Inputs, head: jax.Array, reach: jax.Array, read: Callable[[_Block, Carry], Carry], carry: Carry
) -> Carry:
    """`carry` after `read` has seen the blocks of the segment that are more than W before some query."""
    size = _queries(inputs)
    length = inputs.segment_BTD.shape[1]
    count = max(-(-(length - 1 - NEAR) // size), 0)
    weights_DE = _weights(inputs, head)

    def body(number: jax.Array, carry: Carry) -> Carry:
        first = number * size
        hidden_BJD = jax.lax.dynamic_slice_in_dim(inputs.segment_BTD, first, size, axis=1)
        return read(_Block(head, reach, hidden_BJD, _project(hidden_BJD, weights_DE), first, first + size), carry)

    return jax.lax.fori_loop(0, count, body, carry)


def _over_queries(inputs: Inputs, block: _Block, read: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """`carry` after `read` has seen the query blocks with a query W + 1 … reach positions after a key of the block."""
    size, length = _queries(inputs), inputs.segment_BTD.shape[1]
    # A block of keys is read because some query needs it, so if there is only one block of queries, it is that.
    if inputs.far.one_query_block(length):
        return read(jnp.zeros((), jnp.int32), carry)
    earliest = jnp.maximum(block.first + NEAR + 1, 0)
    latest = jnp.minimum(block.first + block.hidden_BJD.shape[1] - 1 + block.reach, length - 1)
    return jax.lax.fori_loop(earliest // size, latest // size + 1, read, carry)


def _weights(inputs: Inputs, head: jax.Array) -> jax.Array:
    """One head's key and value projections side by side: weights_DE."""
    return jnp.concatenate(
        [
            jax.lax.dynamic_index_in_dim(weight_DHK, head, axis=1, keepdims=False)
            for weight_DHK in (inputs.key_DHK, inputs.value_DHK)
        ],
        axis=-1,
    )


def _project(hidden_BJD: jax.Array, weights_DE: jax.Array) -> jax.Array:
    return jnp.einsum("BJD,DE->BJE", hidden_BJD, weights_DE)


def _tile(shard: Inputs, block: _Block, projected_BJE: jax.Array, number: jax.Array) -> far_tile.Tile:
    queries, keys = _queries(shard), projected_BJE.shape[1]
    offset = number * queries - block.first
    distance = far_tile.distances(offset, queries, keys)[None]
    position = (block.first + jnp.arange(keys))[None, None, :]
    visible = (distance > NEAR) & (distance <= shard.limit) & (position < block.end)
    if shard.valid_length is not None:
        visible = visible & (position >= -shard.valid_length)
    dropout = shard.dropout
    if dropout is not None:
        query_number = (number * queries + jnp.arange(queries))[None, :, None]
        dropout = dropout.at(shard.stream_B[:, None, None]).at(block.head).at(query_number)
    key_BJK, value_BJK = jnp.split(projected_BJE, 2, axis=-1)
    return far_tile.Tile(
        query_BCK=_cut(shard.query_BHTK, block.head, number, queries),
        key_BJK=key_BJK,
        value_BJK=value_BJK,
        table_YK=skew.table_rows(shard.table_PK, shard.far.margin, offset + queries - 1, queries + keys),
        pairs=online_softmax.Pairs(distance, visible, _cut(shard.z_BHT1, block.head, number, queries), dropout),
    )


def _cut(array_BHTX: jax.Array, head: jax.Array, number: jax.Array, size: int) -> jax.Array:
    """One head's block `number` of queries."""
    streams, _, _, last = array_BHTX.shape
    return jax.lax.dynamic_slice(array_BHTX, _corner(head, number * size), (streams, 1, size, last))[:, 0]


def _paste(array_BHTX: jax.Array, new_BCX: jax.Array, head: jax.Array, number: jax.Array) -> jax.Array:
    """The array with one head's block `number` of queries replaced."""
    return jax.lax.dynamic_update_slice(array_BHTX, new_BCX[:, None], _corner(head, number * new_BCX.shape[1]))


def _corner(head: jax.Array, query: jax.Array) -> list[jax.Array]:
    return [jnp.asarray(start, jnp.int32) for start in (0, head, query, 0)]


def _add(array_DHK: jax.Array, new_DK: jax.Array, head: jax.Array) -> jax.Array:
    """The array with `new_DK` added to one head."""
    old_DK = jax.lax.dynamic_index_in_dim(array_DHK, head, axis=1, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(array_DHK, old_DK + new_DK, head, axis=1)
