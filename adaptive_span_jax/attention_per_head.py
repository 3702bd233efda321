"""Attention whose cost follows each head's span: the numbers of `attention.py`, without computing what is masked out.

The work is split by distance. *Near*, distances 1 … W (attention_near.py): every head, tiles of fixed shape, one
batched product for all of them. *Far*, distances beyond W (attention_far.py): only heads that reach that far, block by
block, keys and values projected for one head at a time, in loops whose bounds are values. A head that reads 5,000
positions pays for 5,000, its neighbour that reads 40 pays for W, nothing is projected that nobody reads, and nothing is
compiled again when spans move.

    distance    1 ……… W │ ………………………………………………………………………… S
    head 0      ■■■■■■■■■                                            reach ≤ W: near only
    head 1      ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■              far blocks up to its reach
    head 2      ■■■■■■■■■■■■■                                        one far block

Both parts feed one running softmax. A loop with such bounds has no automatic derivative, so the whole is one
`custom_vjp`: it keeps the output and its log-sum-exp, and the backward pass computes every far tile again (tile.py).
With the log-sum-exp over *all* keys, each tile's gradient stands alone (softmax.py), and near and far add up. Near
keys, values and scores are small enough to be kept.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adaptive_span_jax import attention_far, attention_near, position_table, sharding, softmax
from adaptive_span_jax.attention_inputs import MARGIN, NEAR, InputGradients, Inputs, split
from adaptive_span_jax.dropout import Dropout
from adaptive_span_jax.memory import LayerMemory


def attend(
    query_BTHK: jax.Array,
    segment_BTD: jax.Array,
    memory: LayerMemory,
    key_DHK: jax.Array,
    value_DHK: jax.Array,
    positions_SK: jax.Array,
    z_BTH: jax.Array,
    *,
    ramp: int,
    filled: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """Each head's weighted average of the values it sees, output_BTHK; arguments as in `attention.attend`."""
    streams, length = query_BTHK.shape[:2]
    chunk = min(NEAR, length)
    padding = -length % chunk
    exact = jnp.promote_types(query_BTHK.dtype, jnp.float32)
    z_BTH = jnp.broadcast_to(z_BTH, (z_BTH.shape[0], *query_BTHK.shape[1:3]))
    query_BTHK = query_BTHK * (1 / math.sqrt(query_BTHK.shape[-1]))
    inputs = Inputs(
        query_BHTK=_pad_positions(jnp.moveaxis(query_BTHK, 2, 1), 2, padding),
        segment_BTD=_pad_positions(segment_BTD, 1, padding),
        memory=memory,
        key_DHK=key_DHK,
        value_DHK=value_DHK,
        table_PK=position_table.descending(positions_SK, MARGIN),
        z_BHT1=_pad_positions(jnp.moveaxis(z_BTH, 2, 1)[..., None].astype(exact), 2, padding),
        stream_B=jnp.arange(streams) if dropout is None else dropout.streams(streams),
        filled=filled,
        dropout=dropout,
    )
    return _attend(ramp, inputs)[:, :length]


class _Saved(NamedTuple):
    """What the backward pass is computed from; J counts the W newest positions of memory and those of the segment."""

    output_BTHK: jax.Array  # what is handed on, which keeps it too: as it is, it is kept only once
    log_sum_BHT1: jax.Array
    key_BHJK: jax.Array
    value_BHJK: jax.Array
    score_BHTJ: jax.Array  # near scores of each query with its window of keys


# Streams come first in everything saved.
_SAVED_AXES: Any = _Saved(*[0] * len(_Saved._fields))  # pyrefly: ignore


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ramp: int, inputs: Inputs) -> jax.Array:
    return _forward(ramp, inputs)[0]


def _forward(ramp: int, inputs: Inputs) -> tuple[jax.Array, tuple[Inputs, _Saved]]:
    def forward(inputs: Inputs) -> _Saved:
        lanes = inputs.lanes()
        context_BJD = attention_near.context(inputs)
        key_BHJK, value_BHJK = (_project(context_BJD, weight) for weight in (inputs.key_DHK, inputs.value_DHK))
        running, score = [], []
        for lane, key, value in zip(lanes, split(key_BHJK, lanes), split(value_BHJK, lanes), strict=True):
            near, near_score = attention_near.forward(lane, ramp, key, value)
            running.append(near)
            score.append(near_score)
        finished = [softmax.finish(part) for part in attention_far.forward(inputs, lanes, ramp, running)]
        output, log_sum = (jnp.concatenate(parts) for parts in zip(*finished, strict=True))
        output_BTHK = jnp.moveaxis(output, 1, 2).astype(inputs.query_BHTK.dtype)
        return _Saved(output_BTHK, log_sum, key_BHJK, value_BHJK, jnp.concatenate(score))

    forward = sharding.per_device(forward, inputs.stream_B.size, (_axes(inputs),), _SAVED_AXES)
    saved = forward(inputs)
    return saved.output_BTHK, (inputs, saved)


def _backward(ramp: int, residuals: tuple[Inputs, _Saved], d_output_BTHK: jax.Array) -> tuple[Inputs]:
    def backward(inputs: Inputs, saved: _Saved, d_output_BTHK: jax.Array) -> InputGradients:
        lanes, exact = inputs.lanes(), saved.log_sum_BHT1.dtype
        d_dot_BTH1 = (d_output_BTHK.astype(exact) * saved.output_BTHK.astype(exact)).sum(axis=-1, keepdims=True)
        d_output_BHTK, d_dot_BHT1 = (jnp.moveaxis(array, 1, 2) for array in (d_output_BTHK, d_dot_BTH1))
        log_sum, d_output, d_dot = (split(array, lanes) for array in (saved.log_sum_BHT1, d_output_BHTK, d_dot_BHT1))
        kept = (split(array, lanes) for array in (saved.key_BHJK, saved.value_BHJK, saved.score_BHTJ))
        shares = zip(lanes, *kept, log_sum, d_output, d_dot, strict=True)
        near = [attention_near.backward(lane, ramp, *rest) for lane, *rest in shares]
        found = _from_near(inputs, near)
        return _like_inputs(attention_far.backward(inputs, lanes, ramp, log_sum, d_output, d_dot, found), inputs)

    inputs = residuals[0]
    axes = _axes(inputs)
    gradient_axes = InputGradients(*(getattr(axes, name) for name in InputGradients._fields))
    gradient_axes = jax.tree.map(lambda axis: sharding.SUM if axis == sharding.SAME else axis, gradient_axes)
    backward = sharding.per_device(backward, inputs.stream_B.size, (axes, _SAVED_AXES, 0), gradient_axes)
    found = backward(*residuals, d_output_BTHK)
    # Memory, stream numbers and dropout have no gradient.
    return (Inputs(**dict.fromkeys(Inputs._fields) | found._asdict()),)


_attend.defvjp(_forward, _backward)


def _from_near(inputs: Inputs, lanes: list[attention_near.Found]) -> InputGradients:
    """The near part's gradients of all lanes together, led on from keys and values to what they are projected from."""
    query, key, value, _, z = (jnp.concatenate(parts) for parts in zip(*lanes, strict=True))
    exact, compute = query.dtype, inputs.segment_BTD.dtype
    streams, length, width = inputs.segment_BTD.shape
    context_ND = attention_near.context(inputs).reshape(-1, width)
    d_segment_BTD = jnp.zeros(inputs.segment_BTD.shape, exact)
    d_weights = []
    for weight_DHK, d_BJHK in ((inputs.key_DHK, key), (inputs.value_DHK, value)):
        # In this layout XLA CPU needs no transposed copies.
        d_BJE = d_BJHK.reshape(streams, -1, weight_DHK.shape[1] * weight_DHK.shape[2]).astype(compute)
        d_rows_NE = d_BJE[:, NEAR:].reshape(streams * length, -1)
        d_rows_ND = jnp.einsum("NE,DE->ND", d_rows_NE, weight_DHK.reshape(width, -1), preferred_element_type=exact)
        d_segment_BTD += d_rows_ND.reshape(streams, length, width)
        d_all_NE = d_BJE.reshape(context_ND.shape[0], -1)
        d_weight_DE = jnp.einsum("ND,NE->DE", context_ND, d_all_NE, preferred_element_type=exact)
        d_weights.append(d_weight_DE.reshape(weight_DHK.shape))
    d_table_PK = jnp.zeros(inputs.table_PK.shape, exact)
    d_table_WK = jnp.stack([lane.table_WK for lane in lanes]).sum(axis=0)
    d_table_PK = position_table.add_rows(d_table_PK, MARGIN, NEAR, d_table_WK)
    d_key_DHK, d_value_DHK = d_weights
    return InputGradients(query, d_segment_BTD, d_key_DHK, d_value_DHK, d_table_PK, z)


def _project(rows_BJD: jax.Array, weight_DHK: jax.Array) -> jax.Array:
    width, heads, head_width = weight_DHK.shape
    product_NE = rows_BJD.reshape(-1, width) @ weight_DHK.reshape(width, heads * head_width)
    return jnp.moveaxis(product_NE.reshape(*rows_BJD.shape[:2], heads, head_width), 2, 1)


def _axes(inputs: Inputs) -> Inputs:
    """Which axis of each input counts streams."""
    same = jax.tree.map(lambda _: sharding.SAME, inputs)
    return same._replace(
        query_BHTK=0,
        segment_BTD=0,
        memory=dataclasses.replace(same.memory, hidden_LBMD=1),
        z_BHT1=sharding.SAME if inputs.z_BHT1.shape[0] == 1 else 0,
        stream_B=0,
    )


def _like_inputs(found: InputGradients, inputs: Inputs) -> InputGradients:
    """Gradients in the types of the inputs, and summed over streams where those share a z."""
    if inputs.z_BHT1.shape[0] == 1:
        found = found._replace(z_BHT1=found.z_BHT1.sum(axis=0, keepdims=True))
    return InputGradients(**{name: d.astype(getattr(inputs, name).dtype) for name, d in found._asdict().items()})


def _pad_positions(array: jax.Array, axis: int, padding: int) -> jax.Array:
    return jnp.pad(array, [(0, padding if number == axis else 0) for number in range(array.ndim)])
