"""Attention whose cost follows each head's span: the numbers of reference.py without computing what is masked out.

The work is split by distance. *Near*, distances 1 … W (near.py): every head, tiles of fixed shape, one batched product
for all of them. *Far*, distances beyond W (far.py): only heads that reach that far, block by block, keys and values
projected for the heads that read them, in loops whose bounds are values. A head that reads 5,000 positions pays for
5,000, its neighbour that reads 40 pays for W, and nothing is recompiled when spans move. On GPUs, where few large tiles
are faster than many small ones, up to twice as many far blocks are computed as are read.

    distance    1 ……… W │ ………………………………………………………………………… S
    head 0      ■■■■■■■■■                                            reach ≤ W: near only
    head 1      ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■              far blocks up to its reach
    head 2      ■■■■■■■■■■■■■                                        one far block

Both parts add to one running softmax (online_softmax.py). JAX cannot differentiate loops with such bounds in reverse,
so the whole is one `custom_vjp`. It keeps the output and its log-sum-exp, and the backward pass recomputes every far
tile (far_tile.py). Given the log-sum-exp over *all* keys, each tile's gradient depends on no other tile, and near and
far gradients add up. Near keys, values and scores are small enough to keep.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adaptive_span_jax.model.attention import far, near, online_softmax, skew
from adaptive_span_jax.model.attention.inputs import NEAR, FarShape, InputGradients, Inputs, split
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.memory import LayerMemory
from adaptive_span_jax.runtime import cpu, sharding


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
    valid_length: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(output_BTHK, log_sum_BTH); arguments and results as in `reference.attend`."""
    streams, length = query_BTHK.shape[:2]
    chunk = min(NEAR, length)
    padding = -length % chunk
    accum_dtype = jnp.promote_types(query_BTHK.dtype, jnp.float32)
    far_shape = FarShape.on(sharding.platform())
    z_BTH = jnp.broadcast_to(z_BTH, (z_BTH.shape[0], *query_BTHK.shape[1:3]))
    query_BTHK = query_BTHK * (1 / math.sqrt(query_BTHK.shape[-1]))
    inputs = Inputs(
        query_BHTK=_pad_positions(jnp.moveaxis(query_BTHK, 2, 1), 2, padding),
        segment_BTD=_pad_positions(segment_BTD, 1, padding),
        memory=memory,
        key_DHK=key_DHK,
        value_DHK=value_DHK,
        table_PK=skew.pad_table(positions_SK.astype(segment_BTD.dtype), far_shape.margin),
        z_BHT1=_pad_positions(jnp.moveaxis(z_BTH, 2, 1)[..., None].astype(accum_dtype), 2, padding),
        stream_B=jnp.arange(streams) if dropout is None else dropout.streams(streams),
        valid_length=valid_length,
        dropout=dropout,
        far=far_shape,
    )
    stream_shards = cpu.stream_shards(sharding.streams_per_device(streams))
    output_BTHK, log_sum_BTH = _attend(ramp, stream_shards, inputs)
    return output_BTHK[:, :length], log_sum_BTH[:, :length]


class _Residuals(NamedTuple):
    """What the backward pass reads besides the inputs; J counts the W newest positions of memory and the segment's."""

    output_BTHK: jax.Array  # exactly what is returned: the next operation keeps it too, so it is stored only once
    log_sum_BHT1: jax.Array
    key_BHJK: jax.Array
    value_BHJK: jax.Array
    score_BHTJ: jax.Array  # near scores of each query with its window of keys


# Streams are the first axis of every residual.
_RESIDUAL_AXES: Any = _Residuals(*[0] * len(_Residuals._fields))  # pyrefly: ignore


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(ramp: int, stream_shards: int, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    return _forward(ramp, stream_shards, inputs)[0]


def _forward(
    ramp: int, stream_shards: int, inputs: Inputs
) -> tuple[tuple[jax.Array, jax.Array], tuple[Inputs, _Residuals]]:
    def forward(inputs: Inputs) -> _Residuals:
        shards = inputs.shards(stream_shards)
        context_BJD = near.context(inputs)
        key_BHJK, value_BHJK = (_project(context_BJD, weight) for weight in (inputs.key_DHK, inputs.value_DHK))
        running, score = [], []
        projected = (split(array, stream_shards) for array in (key_BHJK, value_BHJK))
        for shard, shard_key, shard_value in zip(shards, *projected, strict=True):
            shard_running, shard_score = near.forward(shard, ramp, shard_key, shard_value)
            running.append(shard_running)
            score.append(shard_score)
        averages = [online_softmax.finish(part) for part in far.forward(inputs, ramp, running)]
        output, log_sum = (jnp.concatenate(parts) for parts in zip(*averages, strict=True))
        output_BTHK = jnp.moveaxis(output, 1, 2).astype(inputs.query_BHTK.dtype)
        return _Residuals(output_BTHK, log_sum, key_BHJK, value_BHJK, jnp.concatenate(score))

    forward = sharding.per_device(forward, inputs.stream_B.size, (_axes(inputs),), _RESIDUAL_AXES)
    residuals = forward(inputs)
    log_sum_BTH = jnp.moveaxis(residuals.log_sum_BHT1[..., 0], 1, 2)
    return (residuals.output_BTHK, log_sum_BTH), (inputs, residuals)


def _backward(
    ramp: int, stream_shards: int, saved: tuple[Inputs, _Residuals], d_results: tuple[jax.Array, jax.Array]
) -> tuple[Inputs]:
    def backward(
        inputs: Inputs, residuals: _Residuals, d_output_BTHK: jax.Array, d_log_sum_BTH: jax.Array
    ) -> InputGradients:
        shards, accum_dtype = inputs.shards(stream_shards), residuals.log_sum_BHT1.dtype
        output_BTHK, log_sum_BHT1, *near_residuals = residuals
        d_dot_BTH1 = (d_output_BTHK.astype(accum_dtype) * output_BTHK.astype(accum_dtype)).sum(axis=-1, keepdims=True)
        # A score's gradient is weight · (d_weight − d_dot + d_log_sum).
        d_dot_BTH1 -= d_log_sum_BTH[..., None]
        d_output_BHTK, d_dot_BHT1 = (jnp.moveaxis(array, 1, 2) for array in (d_output_BTHK, d_dot_BTH1))
        log_sum, d_output, d_dot = (split(array, stream_shards) for array in (log_sum_BHT1, d_output_BHTK, d_dot_BHT1))
        of_shards = zip(
            shards, *(split(array, stream_shards) for array in near_residuals), log_sum, d_output, d_dot, strict=True
        )
        near_grads = _join_near([near.backward(shard, ramp, *arrays) for shard, *arrays in of_shards], inputs)
        return _like_inputs(far.backward(inputs, ramp, log_sum, d_output, d_dot, near_grads), inputs)

    inputs = saved[0]
    axes = _axes(inputs)
    gradient_axes = InputGradients(*(getattr(axes, name) for name in InputGradients._fields))
    gradient_axes = jax.tree.map(lambda axis: sharding.PSUM if axis == sharding.REPLICATED else axis, gradient_axes)
    backward = sharding.per_device(backward, inputs.stream_B.size, (axes, _RESIDUAL_AXES, 0, 0), gradient_axes)
    grads = backward(*saved, *d_results)
    # Memory, stream numbers and dropout have no gradient.
    none: Any = dict.fromkeys(Inputs._fields) | {"far": inputs.far}
    return (Inputs(**none | grads._asdict()),)


_attend.defvjp(_forward, _backward)


def _join_near(shards: list[near.NearGradients], inputs: Inputs) -> InputGradients:
    """The near part's gradients of all shards, from keys and values on to what they are projected from."""
    query, key, value, _, z = (jnp.concatenate(parts) for parts in zip(*shards, strict=True))
    accum_dtype, compute_dtype = query.dtype, inputs.segment_BTD.dtype
    streams, length, width = inputs.segment_BTD.shape
    context_ND = near.context(inputs).reshape(-1, width)
    d_segment_BTD = jnp.zeros(inputs.segment_BTD.shape, accum_dtype)
    d_weights = []
    for weight_DHK, d_BJHK in ((inputs.key_DHK, key), (inputs.value_DHK, value)):
        # In this layout XLA:CPU needs no transposed copies.
        d_BJE = d_BJHK.reshape(streams, -1, weight_DHK.shape[1] * weight_DHK.shape[2]).astype(compute_dtype)
        d_rows_NE = d_BJE[:, NEAR:].reshape(streams * length, -1)
        weight_DE = weight_DHK.reshape(width, -1)
        d_rows_ND = jnp.einsum("NE,DE->ND", d_rows_NE, weight_DE, preferred_element_type=accum_dtype)
        d_segment_BTD += d_rows_ND.reshape(streams, length, width)
        d_all_NE = d_BJE.reshape(context_ND.shape[0], -1)
        d_weight_DE = jnp.einsum("ND,NE->DE", context_ND, d_all_NE, preferred_element_type=accum_dtype)
        d_weights.append(d_weight_DE.reshape(weight_DHK.shape))
    d_table_PK = jnp.zeros(inputs.table_PK.shape, accum_dtype)
    d_table_WK = jnp.stack([shard.table_WK for shard in shards]).sum(axis=0)
    d_table_PK = skew.add_to_table(d_table_PK, inputs.far.margin, NEAR, d_table_WK)
    d_key_DHK, d_value_DHK = d_weights
    return InputGradients(query, d_segment_BTD, d_key_DHK, d_value_DHK, d_table_PK, z)


def _project(rows_BJD: jax.Array, weight_DHK: jax.Array) -> jax.Array:
    width, heads, head_width = weight_DHK.shape
    product_NE = rows_BJD.reshape(-1, width) @ weight_DHK.reshape(width, heads * head_width)
    return jnp.moveaxis(product_NE.reshape(*rows_BJD.shape[:2], heads, head_width), 2, 1)


def _axes(inputs: Inputs) -> Inputs:
    """The axis of each input that counts streams."""
    axes = jax.tree.map(lambda _: sharding.REPLICATED, inputs)
    return axes._replace(
        query_BHTK=0,
        segment_BTD=0,
        memory=dataclasses.replace(axes.memory, hidden_LBMD=1),
        z_BHT1=sharding.REPLICATED if inputs.z_BHT1.shape[0] == 1 else 0,
        stream_B=0,
    )


def _like_inputs(grads: InputGradients, inputs: Inputs) -> InputGradients:
    """The gradients in the dtypes of the inputs; that of a z which all streams share is summed over them."""
    if inputs.z_BHT1.shape[0] == 1:
        grads = grads._replace(z_BHT1=grads.z_BHT1.sum(axis=0, keepdims=True))
    return InputGradients(**{name: d.astype(getattr(inputs, name).dtype) for name, d in grads._asdict().items()})


def _pad_positions(array: jax.Array, axis: int, padding: int) -> jax.Array:
    return jnp.pad(array, [(0, padding if number == axis else 0) for number in range(array.ndim)])
