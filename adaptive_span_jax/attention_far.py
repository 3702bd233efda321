"""The far part of per-head attention: distances beyond W, for the heads that reach them and only as far as they do.

Heads are taken one after the other. A head reads key blocks, first those of its memory from the newest to the oldest it
reaches, then those of the segment; each block is projected for this head alone, and meets the query blocks it is in reach
of. Both loops have bounds that depend on the spans, so cost follows them without anything being compiled again:

    memory …│ block 1 │ block 0 ║ block 0 │ block 1 │ segment
             ◄──────── reach ───── query
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from adaptive_span_jax import position_table, tile
from adaptive_span_jax.attention_inputs import FAR, MARGIN, NEAR, InputGradients, Inputs
from adaptive_span_jax.span import reach

Carry = TypeVar("Carry")
Tree = TypeVar("Tree")


class _Head(NamedTuple):
    """One head's share of the inputs."""

    number: jax.Array
    reach: jax.Array
    query_BTK: jax.Array
    key_DK: jax.Array
    value_DK: jax.Array
    z_BT1: jax.Array


class _Block(NamedTuple):
    """A block of context."""

    hidden_BJD: jax.Array
    first: jax.Array  # position of its first row; the segment starts at 0
    end: jax.Array  # rows from this position on belong to another block


class _HeadGradients(NamedTuple):
    query_BTK: jax.Array
    key_DK: jax.Array
    value_DK: jax.Array
    z_BT1: jax.Array


def forward(inputs: Inputs, ramp: int, near: tile.Running) -> tile.Running:
    """The softmax over near and far keys, given that over the near ones."""

    def read_head(head_and_running: tuple[_Head, tile.Running]) -> tile.Running:
        head, running = head_and_running

        def read_block(block: _Block, running: tile.Running) -> tile.Running:
            key, value = _project(head, block)

            def read_queries(number: jax.Array, running: tile.Running) -> tile.Running:
                part = _slice(running, number, _queries(inputs))
                part = tile.accumulate(part, _tile(inputs, head, block, key, value, number), ramp)
                return _update(running, number, part)

            return jax.lax.fori_loop(*_query_blocks(inputs, head, block), read_queries, running)

        running = _over_memory(inputs, head, read_block, running)
        return _over_segment(inputs, head, read_block, running)

    heads_first = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), near)
    running = jax.lax.map(read_head, (_heads(inputs, ramp), heads_first))
    return jax.tree.map(lambda array: jnp.moveaxis(array, 0, 1), running)


def backward(
    inputs: Inputs,
    ramp: int,
    log_sum_BHT1: jax.Array,
    d_output_BHTK: jax.Array,
    d_dot_BHT1: jax.Array,
    near: InputGradients,
) -> InputGradients:
    """Every gradient, given the near part's share of it."""
    exact = d_dot_BHT1.dtype
    compute = inputs.segment_BTD.dtype

    def read_head(shared: tuple[jax.Array, jax.Array], slices: tuple) -> tuple[tuple, _HeadGradients]:
        head, log_sum_BT1, d_output_BTK, d_dot_BT1, near_head = slices

        def read_block(block: _Block, carry: tuple, *, in_segment: bool) -> tuple:
            d_head, d_segment_BTD, d_table_PK = carry
            key, value = _project(head, block)

            def read_queries(number: jax.Array, carry: tuple) -> tuple:
                d_query_BTK, d_z_BT1, d_table_PK, d_key, d_value = carry
                size = _queries(inputs)
                part = _tile(inputs, head, block, key, value, number)
                found = tile.gradients(
                    part, ramp, *(_slice(array, number, size) for array in (log_sum_BT1, d_output_BTK, d_dot_BT1))
                )
                furthest = number * size + size - 1 - block.first
                return (
                    _update(d_query_BTK, number, _slice(d_query_BTK, number, size) + found.query),
                    _update(d_z_BT1, number, _slice(d_z_BT1, number, size) + found.z),
                    position_table.add_rows(d_table_PK, MARGIN, furthest, found.table_YK),
                    d_key + found.key,
                    d_value + found.value,
                )

            nothing = jnp.zeros(key.shape, exact)
            carry = (d_head.query_BTK, d_head.z_BT1, d_table_PK, nothing, nothing)
            carry = jax.lax.fori_loop(*_query_blocks(inputs, head, block), read_queries, carry)
            d_query_BTK, d_z_BT1, d_table_PK, d_key, d_value = carry
            d_key, d_value = d_key.astype(compute), d_value.astype(compute)
            d_head = _HeadGradients(
                d_query_BTK,
                d_head.key_DK + jnp.einsum("BJD,BJK->DK", block.hidden_BJD, d_key, preferred_element_type=exact),
                d_head.value_DK + jnp.einsum("BJD,BJK->DK", block.hidden_BJD, d_value, preferred_element_type=exact),
                d_z_BT1,
            )
            if in_segment:
                d_hidden = jnp.einsum("BJK,DK->BJD", d_key, head.key_DK) + jnp.einsum(
                    "BJK,DK->BJD", d_value, head.value_DK
                )
                number = block.first // d_hidden.shape[1]
                both = _slice(d_segment_BTD, number, d_hidden.shape[1]) + d_hidden
                d_segment_BTD = _update(d_segment_BTD, number, both)
            return d_head, d_segment_BTD, d_table_PK

        carry = (near_head, *shared)
        carry = _over_memory(inputs, head, lambda block, c: read_block(block, c, in_segment=False), carry)
        carry = _over_segment(inputs, head, lambda block, c: read_block(block, c, in_segment=True), carry)
        d_head, *shared_after = carry
        return tuple(shared_after), d_head

    per_head = jax.tree.map(lambda array: jnp.moveaxis(array, 1, 0), (log_sum_BHT1, d_output_BHTK, d_dot_BHT1))
    near_heads = _HeadGradients(
        *(
            jnp.moveaxis(array, 1, 0).astype(exact)
            for array in (near.query_BHTK, near.key_DHK, near.value_DHK, near.z_BHT1)
        )
    )
    (d_segment_BTD, d_table_PK), found = jax.lax.scan(
        read_head, (near.segment_BTD, near.table_PK), (_heads(inputs, ramp), *per_head, near_heads)
    )
    query, key, value, z = (jnp.moveaxis(array, 0, 1) for array in found)
    return InputGradients(query, d_segment_BTD, key, value, d_table_PK, z)


def _heads(inputs: Inputs, ramp: int) -> _Head:
    """All heads, stacked along the first axis."""
    per_head = (inputs.query_BHTK, inputs.key_DHK, inputs.value_DHK, inputs.z_BHT1)
    furthest_H = reach(inputs.z_BHT1.max(axis=(0, 2, 3)), ramp, inputs.limit)
    return _Head(jnp.arange(furthest_H.shape[0]), furthest_H, *(jnp.moveaxis(array, 1, 0) for array in per_head))


def _queries(inputs: Inputs) -> int:
    """How many queries a far tile has."""
    length = inputs.segment_BTD.shape[1]
    return FAR if length % FAR == 0 else inputs.chunk


def _over_memory(inputs: Inputs, head: _Head, read: Callable[[_Block, Carry], Carry], carry: Carry) -> Carry:
    """Reads the memory blocks that a head reaches, newest first."""
    size = min(FAR, inputs.limit)
    count = jnp.where(head.reach > NEAR, -(-head.reach // size), 0)

    def body(number: jax.Array, carry: Carry) -> Carry:
        # The oldest block may be cut short by the end of memory; it then overlaps the one before.
        back = jnp.minimum((number + 1) * size, inputs.limit)
        hidden = inputs.memory.block(back, size).astype(inputs.segment_BTD.dtype)
        return read(_Block(hidden, -back, -number * size), carry)

    return jax.lax.fori_loop(0, count, body, carry)


def _over_segment(inputs: Inputs, head: _Head, read: Callable[[_Block, Carry], Carry], carry: Carry) -> Carry:
    """Reads the segment's blocks that some query has further behind it than W."""
    size = _queries(inputs)
    length = inputs.segment_BTD.shape[1]
    count = jnp.where(head.reach > NEAR, max(-(-(length - 1 - NEAR) // size), 0), 0)

    def body(number: jax.Array, carry: Carry) -> Carry:
        first = number * size
        return read(_Block(_slice(inputs.segment_BTD, number, size), first, first + size), carry)

    return jax.lax.fori_loop(0, count, body, carry)


def _query_blocks(inputs: Inputs, head: _Head, block: _Block) -> tuple[jax.Array, jax.Array]:
    """The query blocks with a query between W + 1 and the head's reach behind a key of the block: first and end."""
    size, length = _queries(inputs), inputs.segment_BTD.shape[1]
    earliest = jnp.maximum(block.first + NEAR + 1, 0)
    latest = jnp.minimum(block.first + block.hidden_BJD.shape[1] - 1 + head.reach, length - 1)
    return earliest // size, latest // size + 1


def _project(head: _Head, block: _Block) -> tuple[jax.Array, jax.Array]:
    key = jnp.einsum("BJD,DK->BJK", block.hidden_BJD, head.key_DK)
    return key, jnp.einsum("BJD,DK->BJK", block.hidden_BJD, head.value_DK)


def _tile(inputs: Inputs, head: _Head, block: _Block, key: jax.Array, value: jax.Array, number: jax.Array) -> tile.Tile:
    queries, keys = _queries(inputs), key.shape[1]
    offset = number * queries - block.first
    distance = tile.distances(offset, queries, keys)[None]
    position = (block.first + jnp.arange(keys))[None, None, :]
    visible = (distance > NEAR) & (distance <= inputs.limit) & (position < block.end)
    if inputs.filled is not None:
        visible = visible & (position >= -inputs.filled)
    dropout = inputs.dropout
    if dropout is not None:
        query_number = (number * queries + jnp.arange(queries))[None, :, None]
        dropout = dropout.at(inputs.stream_B[:, None, None]).at(head.number).at(query_number)
    return tile.Tile(
        query=_slice(head.query_BTK, number, queries),
        key=key,
        value=value,
        table_YK=position_table.rows(inputs.table_PK, MARGIN, offset + queries - 1, queries + keys),
        distance=distance,
        visible=visible,
        z=_slice(head.z_BT1, number, queries),
        dropout=dropout,
    )


def _slice(tree: Tree, number: jax.Array, size: int) -> Tree:
    """Block `number` of every array's second axis."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, number * size, size, axis=1), tree)


def _update(tree: Tree, number: jax.Array, part: Tree) -> Tree:
    """Every array with block `number` of its second axis replaced."""
    return jax.tree.map(
        lambda array, new: jax.lax.dynamic_update_slice_in_dim(array, new, number * new.shape[1], axis=1), tree, part
    )
