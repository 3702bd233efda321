"""Attention to persistent vectors by TPU kernels, behind the signature of `join` in ../persistent.py."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from adaptive_span_jax.model.attention.fused.layout import USABLE_VMEM_BYTES
from adaptive_span_jax.model.attention.fused.persistent_kernels import (
    Operands,
    Outputs,
    Sizes,
    backward,
    forward,
    vmem_bytes,
)
from adaptive_span_jax.model.attention.fused.sizes import BLOCK
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.runtime import sharding

# Registers hold whole heads, and the rows of a transposed head are whole tiles.
_HEAD_WIDTHS = (32, 64, 128)


def unsupported(segment: int, head_width: int, vectors: int, dtype: DTypeLike) -> str | None:
    """Why the kernels cannot read these persistent vectors, or None if they can; for sizes of `fused.attend`."""
    if vectors == 0:
        return None
    if head_width not in _HEAD_WIDTHS:
        return f"heads of {head_width} are none of {', '.join(map(str, _HEAD_WIDTHS))}"
    if vectors % BLOCK:
        return f"model.persistent = {vectors} is not a multiple of {BLOCK}"
    needed = vmem_bytes(segment, head_width, vectors, dtype)
    if needed > USABLE_VMEM_BYTES:
        mebibytes = f"{needed / 2**20:.0f} MiB of VMEM, of which {USABLE_VMEM_BYTES / 2**20:.0f} MiB can be used"
        return f"model.persistent = {vectors} would need {mebibytes}"
    return None


def join(
    in_context: tuple[jax.Array, jax.Array],
    query_BTHK: jax.Array,
    key_HKU: jax.Array,
    value_HUK: jax.Array,
    dropout: Dropout | None = None,
) -> jax.Array:
    """The average over context and persistent vectors, output_BTHK, given (output_BTHK, log_sum_BTH) of the context.

    On other platforms than TPUs the kernels are interpreted, which is slow.
    """
    streams, length, heads, _ = query_BTHK.shape
    context_BTHK, log_sum_BTH = in_context
    word_BH = jnp.zeros((streams, heads), jnp.uint32)
    if dropout is not None:
        word_BH = dropout.at(dropout.streams(streams)[:, None]).at(jnp.arange(heads)[None, :]).word
    inputs = _Inputs(
        query_BTQ=query_BTHK.reshape(streams, length, -1),
        context_BTQ=context_BTHK.reshape(streams, length, -1),
        log_sum_BH1T=jnp.moveaxis(log_sum_BTH, 2, 1)[:, :, None],
        key_HKU=key_HKU,
        value_HUK=value_HUK,
        word_BH=word_BH,
    )
    setting = _Setting(dropout.rate if dropout else 0.0, interpret=sharding.platform() != "tpu")
    return _join(setting, inputs).reshape(query_BTHK.shape)


class _Setting(NamedTuple):
    dropout: float
    interpret: bool


class _Inputs(NamedTuple):
    query_BTQ: Any
    context_BTQ: Any
    log_sum_BH1T: Any
    key_HKU: Any
    value_HUK: Any
    word_BH: Any


_AXES = _Inputs(0, 0, 0, sharding.REPLICATED, sharding.REPLICATED, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _join(setting: _Setting, inputs: _Inputs) -> jax.Array:
    return _forward(setting, inputs)[0]


def _forward(setting: _Setting, inputs: _Inputs) -> tuple[jax.Array, tuple[_Inputs, Outputs]]:
    def run(inputs: _Inputs) -> Outputs:
        return forward(_sizes(setting, inputs), inputs.word_BH.reshape(-1), _operands(inputs))

    outputs = sharding.per_device(run, inputs.query_BTQ.shape[0], (_AXES,), Outputs(0, 0))(inputs)
    return outputs.output_BTQ, (inputs, outputs)


def _backward(setting: _Setting, saved: tuple[_Inputs, Outputs], d_output_BTQ: jax.Array) -> tuple[_Inputs]:
    def run(inputs: _Inputs, outputs: Outputs, d_output_BTQ: jax.Array) -> _Inputs:
        sizes = _sizes(setting, inputs)
        grads = backward(sizes, inputs.word_BH.reshape(-1), _operands(inputs), outputs, d_output_BTQ)
        d_key_HKU, d_value_HKU = (
            each.sum(axis=0).reshape(inputs.key_HKU.shape).astype(sizes.dtype)
            for each in (grads.key_CQU, grads.value_CQU)
        )
        d_value_HUK = jnp.swapaxes(d_value_HKU, 1, 2)
        return _Inputs(grads.query_BTQ, grads.context_BTQ, grads.log_sum_BH1T, d_key_HKU, d_value_HUK, None)

    out_axes = _AXES._replace(key_HKU=sharding.PSUM, value_HUK=sharding.PSUM, word_BH=None)
    run_on_devices = sharding.per_device(run, d_output_BTQ.shape[0], (_AXES, Outputs(0, 0), 0), out_axes)
    return (run_on_devices(*saved, d_output_BTQ),)


_join.defvjp(_forward, _backward)


def _sizes(setting: _Setting, inputs: _Inputs) -> Sizes:
    streams, segment, _ = inputs.query_BTQ.shape
    heads, head_width, vectors = inputs.key_HKU.shape
    cores = sharding.cores_per_device()
    return Sizes(
        streams=streams,
        cores=cores if streams % cores == 0 else 1,
        segment=segment,
        heads=heads,
        head_width=head_width,
        vectors=vectors,
        dtype=inputs.query_BTQ.dtype,
        dropout=setting.dropout,
        interpret=setting.interpret,
    )


def _operands(inputs: _Inputs) -> Operands:
    heads, head_width, vectors = inputs.key_HKU.shape
    key_QU = inputs.key_HKU.reshape(heads * head_width, vectors)
    value_UQ = jnp.swapaxes(inputs.value_HUK, 0, 1).reshape(vectors, heads * head_width)
    log_sum_BH1T = inputs.log_sum_BH1T * math.log2(math.e)
    return Operands(inputs.query_BTQ, inputs.context_BTQ, log_sum_BH1T, key_QU.T, value_UQ, key_QU, value_UQ.T)
