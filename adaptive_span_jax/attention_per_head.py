"""Attention whose cost follows each head's span: the same numbers as `attention.py`, without computing what is masked out.

The work is split by distance. *Near*, distances 1 … W (attention_near.py): every head, tiles of fixed shape, one batched
product for all of them. *Far*, distances beyond W (attention_far.py): only heads that reach that far, block by block, keys
and values projected for one head at a time, in loops whose bounds are values. A head that reads 5,000 positions pays for
5,000, its neighbour that reads 40 pays for W, nothing is projected that nobody reads, and nothing is compiled again when
spans move.

    distance    1 ……… W │ ………………………………………………………………………… S
    head 0      ■■■■■■■■■                                            reach ≤ W: near only
    head 1      ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■              far blocks up to its reach
    head 2      ■■■■■■■■■■■■■                                        one far block

Both parts feed one running softmax. A loop with such bounds has no automatic derivative, so the whole is one
`custom_vjp`: it keeps the output and its log-sum-exp, and the backward pass computes every tile again (tile.py). With the
log-sum-exp over *all* keys, each tile's gradient stands alone and near and far add up.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from adaptive_span_jax import attention_far, attention_near, position_table, sharding, tile
from adaptive_span_jax.attention_inputs import MARGIN, NEAR, InputGradients, Inputs
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
    length = query_BTHK.shape[1]
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
        stream_B=jnp.arange(query_BTHK.shape[0]),
        filled=filled,
        dropout=dropout,
    )
    output_BHTK = _attend(ramp, inputs)
    return jnp.moveaxis(output_BHTK[:, :, :length], 1, 2).astype(query_BTHK.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ramp: int, inputs: Inputs) -> jax.Array:
    return _forward(ramp, inputs)[0]


def _forward(ramp: int, inputs: Inputs) -> tuple[jax.Array, tuple[Inputs, jax.Array, jax.Array]]:
    def forward(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        running = attention_near.forward(inputs, ramp)
        return tile.finish(attention_far.forward(inputs, ramp, running))

    forward = sharding.per_device(forward, inputs.stream_B.size, (_axes(inputs),), (0, 0))
    output_BHTK, log_sum_BHT1 = forward(inputs)
    return output_BHTK, (inputs, output_BHTK, log_sum_BHT1)


def _backward(ramp: int, saved: tuple[Inputs, jax.Array, jax.Array], d_output_BHTK: jax.Array) -> tuple[Inputs]:
    def backward(
        inputs: Inputs, output_BHTK: jax.Array, log_sum_BHT1: jax.Array, d_output_BHTK: jax.Array
    ) -> InputGradients:
        d_dot_BHT1 = (d_output_BHTK * output_BHTK).sum(axis=-1, keepdims=True)
        found = attention_near.backward(inputs, ramp, log_sum_BHT1, d_output_BHTK, d_dot_BHT1)
        found = attention_far.backward(inputs, ramp, log_sum_BHT1, d_output_BHTK, d_dot_BHT1, found)
        return _like_inputs(found, inputs)

    inputs = saved[0]
    axes = _axes(inputs)
    gradient_axes = InputGradients(*(getattr(axes, name) for name in InputGradients._fields))
    gradient_axes = jax.tree.map(lambda axis: sharding.SUM if axis == sharding.SAME else axis, gradient_axes)
    backward = sharding.per_device(backward, inputs.stream_B.size, (axes, 0, 0, 0), gradient_axes)
    found = backward(*saved, d_output_BHTK)
    # Memory, stream numbers and dropout have no gradient.
    return (Inputs(**dict.fromkeys(Inputs._fields) | found._asdict()),)


_attend.defvjp(_forward, _backward)


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
