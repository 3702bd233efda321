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

import functools
import math

import jax
import jax.numpy as jnp

from adaptive_span_jax import attention_far, attention_near, position_table, tile
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
    running = attention_near.forward(inputs, ramp)
    running = attention_far.forward(inputs, ramp, running)
    output_BHTK, log_sum_BHT1 = tile.finish(running)
    return output_BHTK, (inputs, output_BHTK, log_sum_BHT1)


def _backward(ramp: int, saved: tuple[Inputs, jax.Array, jax.Array], d_output_BHTK: jax.Array) -> tuple[Inputs]:
    inputs, output_BHTK, log_sum_BHT1 = saved
    d_dot_BHT1 = (d_output_BHTK * output_BHTK).sum(axis=-1, keepdims=True)
    found = attention_near.backward(inputs, ramp, log_sum_BHT1, d_output_BHTK, d_dot_BHT1)
    found = attention_far.backward(inputs, ramp, log_sum_BHT1, d_output_BHTK, d_dot_BHT1, found)
    return (_as_cotangent(inputs, found),)


_attend.defvjp(_forward, _backward)


def _as_cotangent(inputs: Inputs, found: InputGradients) -> Inputs:
    """Gradients in the types and shapes of the inputs; memory, stream numbers and dropout have none."""
    d_z = found.z_BHT1
    if inputs.z_BHT1.shape[0] == 1:
        d_z = d_z.sum(axis=0, keepdims=True)
    typed = {name: d.astype(getattr(inputs, name).dtype) for name, d in found._replace(z_BHT1=d_z)._asdict().items()}
    return Inputs(**dict.fromkeys(Inputs._fields) | typed)


def _pad_positions(array: jax.Array, axis: int, padding: int) -> jax.Array:
    return jnp.pad(array, [(0, padding if number == axis else 0) for number in range(array.ndim)])
