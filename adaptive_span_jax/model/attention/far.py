"""The far part of per-head attention: distances beyond W, for the heads that reach them and only as far as they do.

Heads that reach beyond W are read in the order of their reach, on CPUs and TPUs one after the other, on GPUs up to
eight together. Key blocks are read first of memory, from the newest to the oldest that is reached, then of the segment.
Each block is projected for the heads that read it, and is read by the query blocks within reach. Loop bounds are values
that depend on the spans: cost follows the spans, and nothing is recompiled.

    memory …│ block 1 │ block 0 ║ block 0 │ block 1 │ segment
             ◄──────── reach ───── query

Of heads that are read together, those that reach a block are the first few. The block is read in one turn by the
smallest group that has them all: the first 8, 4, 2 or 1 heads, in one product for all of them. What the others of the
group compute is masked out. From group to group is from loop to loop, so turns are few, and shapes constant:

    memory      block 3   block 2   block 1   block 0
    head 5     ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■
    head 0                          ■■■■■■■■■■■■■■■■■
    head 7                               ■■■■■■■■■■■■
    group       1 head    1 head    4 heads   4 heads

Within one turn, the shards of streams (see `Inputs.shards`) are independent of each other.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from adaptive_span_jax.model.attention import far_tile, online_softmax, skew
from adaptive_span_jax.model.attention.inputs import NEAR, InputGradients, Inputs, split
from adaptive_span_jax.model.span import reach

Carry = TypeVar("Carry")
OfHeads = TypeVar("OfHeads")  # a tree of arrays whose second axis counts heads


class _Heads(NamedTuple):
    """Some heads of a layer, the furthest reach first."""

    inputs: Inputs  # of these heads only
    number_H: jax.Array  # among the heads of the layer
    reach_H: jax.Array


class _Block(NamedTuple):
    """A block of keys, read by a group: the first few of some heads. E: a head's key and value side by side."""

    heads: _Heads
    weights_DHE: jax.Array  # of the group
    hidden_BJD: jax.Array
    first: jax.Array  # position of its first row; the segment starts at 0
    end: jax.Array  # rows from this position on are read with another block
    in_segment: bool

    @property
    def group(self) -> int:
        """How many of the heads read it."""
        return self.weights_DHE.shape[1]

    def project(self, stream_shards: int) -> list[jax.Array]:
        """The group's keys and values, projected_BJHE, for each shard of streams."""
        return split(jnp.einsum("BJD,DHE->BJHE", self.hidden_BJD, self.weights_DHE), stream_shards)


def forward(inputs: Inputs, ramp: int, near: list[online_softmax.Running]) -> list[online_softmax.Running]:
    """The softmax over near and far keys of each shard of streams, given that over the near ones."""
    size = _queries(inputs)

    def read_block(block: _Block, running: list[online_softmax.Running]) -> list[online_softmax.Running]:
        shards, projected = block.heads.inputs.shards(len(running)), block.project(len(running))

        def read_queries(number: jax.Array, running: list[online_softmax.Running]) -> list[online_softmax.Running]:
            after = []
            for shard, shard_projected, part in zip(shards, projected, running, strict=True):
                partial = online_softmax.Running(*(_cut(array, block.group, number, size) for array in part))
                partial = far_tile.accumulate(partial, _tile(shard, block, shard_projected, number), ramp)
                after.append(
                    online_softmax.Running(*(_paste(*pair, number) for pair in zip(part, partial, strict=True)))
                )
            return after

        return _over_queries(block, read_queries, running)

    def read_heads(heads: _Heads, running: list[online_softmax.Running]) -> list[online_softmax.Running]:
        after = _over_blocks(heads, read_block, _take(running, heads.number_H))
        return _put(running, after, heads.number_H)

    return _over_heads(inputs, ramp, read_heads, near)


def backward(
    inputs: Inputs,
    ramp: int,
    log_sum: list[jax.Array],
    d_output: list[jax.Array],
    d_dot: list[jax.Array],
    near: InputGradients,
) -> InputGradients:
    """The gradients of near and far part together, given those of the near part."""
    size, stream_shards = _queries(inputs), len(log_sum)
    accum_dtype, compute_dtype = d_dot[0].dtype, inputs.segment_BTD.dtype

    def read_block(residuals: tuple, block: _Block, carry: tuple) -> tuple:
        d_weights_HED, d_segment_BTD, d_query, d_z, d_table_PK = carry
        shards, projected = block.heads.inputs.shards(stream_shards), block.project(stream_shards)

        def read_queries(number: jax.Array, carry: tuple) -> tuple:
            d_query, d_z, d_table_PK, d_projected, scratch = carry
            furthest = number * size + size - 1 - block.first
            after: tuple[list, list, list, list] = ([], [], [], [])
            for index, (shard, shard_projected) in enumerate(zip(shards, projected, strict=True)):
                of_tile = (_cut(array[index], block.group, number, size) for array in residuals)
                tile = _tile(shard, block, shard_projected, number)
                grads, used = far_tile.gradients(tile, ramp, *of_tile, scratch=scratch[index])
                d_table_PK = skew.add_to_table(d_table_PK, inputs.far.margin, furthest, grads.table_YK)
                for old, new, done in ((d_query, grads.query_BHCK, after[0]), (d_z, grads.z_BHC1, after[1])):
                    summed = _cut(old[index], block.group, number, size) + new
                    done.append(_paste(old[index], summed, number))
                d_projected_BHJE = jnp.concatenate([grads.key_BHJK, grads.value_BHJK], axis=-1)
                after[2].append(d_projected[index] + jnp.moveaxis(d_projected_BHJE, 1, 2))
                after[3].append(used)
            return after[0], after[1], d_table_PK, after[2], after[3]

        zeros = [jnp.zeros(part.shape, accum_dtype) for part in projected]
        scratch = [
            far_tile.make_scratch(streams, heads, size, keys, compute_dtype)
            for streams, keys, heads, _ in (part.shape for part in zeros)
        ]
        carry = (d_query, d_z, d_table_PK, zeros, scratch)
        d_query, d_z, d_table_PK, d_projected, _ = _over_queries(block, read_queries, carry)
        d_projected_BJHE = jnp.concatenate(d_projected).astype(compute_dtype)
        d_block_HED = jnp.einsum(
            "BJHE,BJD->HED", d_projected_BJHE, block.hidden_BJD, preferred_element_type=accum_dtype
        )
        d_weights_HED = d_weights_HED.at[: block.group].add(d_block_HED)
        if block.in_segment:
            d_hidden_BJD = jnp.einsum("BJHE,DHE->BJD", d_projected_BJHE, block.weights_DHE)
            old = jax.lax.dynamic_slice_in_dim(d_segment_BTD, block.first, d_hidden_BJD.shape[1], axis=1)
            d_segment_BTD = jax.lax.dynamic_update_slice_in_dim(d_segment_BTD, old + d_hidden_BJD, block.first, axis=1)
        return d_weights_HED, d_segment_BTD, d_query, d_z, d_table_PK

    def read_heads(heads: _Heads, grads: tuple) -> tuple:
        d_of_heads, d_segment_BTD, d_table_PK = grads
        d_key_DHK, d_value_DHK, d_query, d_z = _take(d_of_heads, heads.number_H)
        width, count, head_width = d_key_DHK.shape
        read = functools.partial(read_block, _take((log_sum, d_output, d_dot), heads.number_H))
        carry = (jnp.zeros((count, 2 * head_width, width), accum_dtype), d_segment_BTD, d_query, d_z, d_table_PK)
        d_weights_HED, d_segment_BTD, d_query, d_z, d_table_PK = _over_blocks(heads, read, carry)
        d_far_key_DHK, d_far_value_DHK = jnp.split(jnp.moveaxis(d_weights_HED, 2, 0), 2, axis=2)
        after = (d_key_DHK + d_far_key_DHK, d_value_DHK + d_far_value_DHK, d_query, d_z)
        return _put(d_of_heads, after, heads.number_H), d_segment_BTD, d_table_PK

    d_query, d_z = (split(array, stream_shards) for array in (near.query_BHTK, near.z_BHT1))
    grads = ((near.key_DHK, near.value_DHK, d_query, d_z), near.segment_BTD, near.table_PK)
    grads = _over_heads(inputs, ramp, read_heads, grads)
    (d_key_DHK, d_value_DHK, d_query, d_z), d_segment_BTD, d_table_PK = grads
    return InputGradients(
        jnp.concatenate(d_query), d_segment_BTD, d_key_DHK, d_value_DHK, d_table_PK, jnp.concatenate(d_z)
    )


def _over_heads(inputs: Inputs, ramp: int, read: Callable[[_Heads, Carry], Carry], carry: Carry) -> Carry:
    """`carry` after `read` has seen the heads that reach beyond W, as many at a time as are read together."""
    # Each head's reach is the largest over its tokens.
    reach_H = reach(inputs.z_BHT1.max(axis=(0, 2, 3)), ramp, inputs.limit)
    size = inputs.far.groups(reach_H.size)[0]
    order_H, count = jnp.argsort(-reach_H), (reach_H > NEAR).sum()

    def body(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        first, carry = state
        number_H = jax.lax.dynamic_slice_in_dim(order_H, first, size)
        heads = _Heads(inputs.of_heads(lambda array: _take(array, number_H)), number_H, reach_H[number_H])
        return first + size, read(heads, carry)

    return jax.lax.while_loop(lambda state: state[0] < count, body, (jnp.zeros_like(count), carry))[1]


def _over_blocks(heads: _Heads, read: Callable[[_Block, Carry], Carry], carry: Carry) -> Carry:
    """`carry` after `read` has seen every block that any of the heads reaches, each for one group of them."""
    sizes = heads.inputs.far.groups(heads.reach_H.size)
    for group, smaller in zip(sizes, (*sizes[1:], 0), strict=True):
        # Blocks that more heads reach than are in the smaller group, less those that more reach than are in this one.
        nearer = heads.reach_H[group] if group < sizes[0] else None
        carry = _over_memory(heads, group, nearer, heads.reach_H[smaller], read, carry)
        carry = _over_segment(heads, group, nearer, heads.reach_H[smaller], read, carry)
    return carry


def _over_memory(
    heads: _Heads,
    group: int,
    nearer: jax.Array | None,
    reach: jax.Array,
    read: Callable[[_Block, Carry], Carry],
    carry: Carry,
) -> Carry:
    """`carry` after `read` has seen the memory blocks within `reach`, but for those within `nearer`; newest first."""
    inputs = heads.inputs
    size = inputs.far.keys(inputs.limit)
    weights_DHE = _weights(inputs, group)

    def blocks(reach: jax.Array) -> jax.Array:
        return jnp.where(reach > NEAR, -(-reach // size), 0)

    def body(number: jax.Array, carry: Carry) -> Carry:
        # The oldest block starts where memory does. Rows that it shares with the block before are masked by `end`.
        back = jnp.minimum((number + 1) * size, inputs.limit)
        hidden_BJD = inputs.memory.block(back, size).astype(weights_DHE.dtype)
        return read(_Block(heads, weights_DHE, hidden_BJD, -back, -number * size, in_segment=False), carry)

    return jax.lax.fori_loop(0 if nearer is None else blocks(nearer), blocks(reach), body, carry)


def _over_segment(
    heads: _Heads,
    group: int,
    nearer: jax.Array | None,
    reach: jax.Array,
    read: Callable[[_Block, Carry], Carry],
    carry: Carry,
) -> Carry:
    """`carry` after `read` has seen the blocks of the segment that are more than W before some query.

    Every head that reaches beyond W reads them all.
    """
    inputs, size = heads.inputs, _queries(heads.inputs)
    blocks = max(-(-(inputs.segment_BTD.shape[1] - 1 - NEAR) // size), 0)
    weights_DHE = _weights(inputs, group)

    def body(number: jax.Array, carry: Carry) -> Carry:
        first = number * size
        hidden_BJD = jax.lax.dynamic_slice_in_dim(inputs.segment_BTD, first, size, axis=1)
        return read(_Block(heads, weights_DHE, hidden_BJD, first, first + size, in_segment=True), carry)

    # A head that is read alone is read because it reaches this far.
    if inputs.far.heads > 1:
        read_here = reach > NEAR if nearer is None else (reach > NEAR) & (nearer <= NEAR)
        blocks = jnp.where(read_here, blocks, 0)
    return jax.lax.fori_loop(0, blocks, body, carry)


def _over_queries(block: _Block, read: Callable[[jax.Array, Carry], Carry], carry: Carry) -> Carry:
    """`carry` after `read` has seen the query blocks with a query W + 1 … reach positions after a key of the block."""
    inputs = block.heads.inputs
    size, length = _queries(inputs), inputs.segment_BTD.shape[1]
    # A block of keys is read because some query needs it, so if there is only one block of queries, it is that.
    if inputs.far.one_query_block(length):
        return read(jnp.zeros((), jnp.int32), carry)
    earliest = jnp.maximum(block.first + NEAR + 1, 0)
    latest = jnp.minimum(block.first + block.hidden_BJD.shape[1] - 1 + block.heads.reach_H[0], length - 1)
    return jax.lax.fori_loop(earliest // size, latest // size + 1, read, carry)


def _queries(inputs: Inputs) -> int:
    """The number of queries in a far tile."""
    return inputs.far.queries(inputs.segment_BTD.shape[1])


def _weights(inputs: Inputs, group: int) -> jax.Array:
    """The key and value projections of the first heads side by side: weights_DHE."""
    return jnp.concatenate([inputs.key_DHK[:, :group], inputs.value_DHK[:, :group]], axis=-1)


def _tile(shard: Inputs, block: _Block, projected_BJHE: jax.Array, number: jax.Array) -> far_tile.Tile:
    queries, keys = _queries(shard), projected_BJHE.shape[1]
    offset = number * queries - block.first
    distance = far_tile.distances(offset, queries, keys)[None, None]
    position = (block.first + jnp.arange(keys))[None, None, None, :]
    visible = (distance > NEAR) & (distance <= shard.limit) & (position < block.end)
    if shard.valid_length is not None:
        visible = visible & (position >= -shard.valid_length)
    dropout = shard.dropout
    if dropout is not None:
        head_H = block.heads.number_H[: block.group]
        query_number = (number * queries + jnp.arange(queries))[None, None, :, None]
        dropout = dropout.at(shard.stream_B[:, None, None, None]).at(head_H[None, :, None, None])
        dropout = dropout.at(query_number)
    key_BHJK, value_BHJK = (jnp.moveaxis(part, 2, 1) for part in jnp.split(projected_BJHE, 2, axis=-1))
    return far_tile.Tile(
        query_BHCK=_cut(shard.query_BHTK, block.group, number, queries),
        key_BHJK=key_BHJK,
        value_BHJK=value_BHJK,
        table_YK=skew.table_rows(shard.table_PK, shard.far.margin, offset + queries - 1, queries + keys),
        pairs=online_softmax.Pairs(distance, visible, _cut(shard.z_BHT1, block.group, number, queries), dropout),
    )


def _take(tree: OfHeads, number_H: jax.Array) -> OfHeads:
    """The arrays with these heads only."""

    def take(array: jax.Array) -> jax.Array:
        if number_H.size == 1:  # XLA:CPU is slower at gathering and scattering
            return jax.lax.dynamic_slice_in_dim(array, number_H[0], 1, axis=1)
        return array.at[:, number_H].get(mode="promise_in_bounds")

    return jax.tree.map(take, tree)


def _put(tree: OfHeads, new: OfHeads, number_H: jax.Array) -> OfHeads:
    """The arrays with these heads replaced."""

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        if number_H.size == 1:
            return jax.lax.dynamic_update_slice_in_dim(array, new, number_H[0], axis=1)
        return array.at[:, number_H].set(new, unique_indices=True, mode="promise_in_bounds")

    return jax.tree.map(put, tree, new)


def _cut(array_BHTX: jax.Array, count: int, number: jax.Array, size: int) -> jax.Array:
    """Block `number` of the queries of the first `count` heads."""
    return jax.lax.dynamic_slice_in_dim(array_BHTX[:, :count], number * size, size, axis=2)


def _paste(array_BHTX: jax.Array, new_BHCX: jax.Array, number: jax.Array) -> jax.Array:
    """The array with block `number` of the queries of its first heads replaced."""
    corner = [jnp.asarray(start, jnp.int32) for start in (0, 0, number * new_BHCX.shape[2], 0)]
    return jax.lax.dynamic_update_slice(array_BHTX, new_BHCX, corner)
