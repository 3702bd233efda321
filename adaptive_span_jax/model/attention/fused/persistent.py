"""Attention to persistent vectors, joined with attention to the context: a kernel forward and a kernel backward.

A program handles one stream and the heads that share a register: two of width 64. It continues the softmax over the
context, given as its average and log-sum-exp, with the persistent vectors, 128 at a time. Scores are held transposed,
[vectors, queries]: maxima and sums over vectors then need no exchange between lanes, and what belongs to a query is a
row. Products with K rows of keys, values, queries or gradients have score tiles as their stationary operands.

Streams are the innermost axis of the grid: a head's keys and values, and their gradients, stay in VMEM for all of them.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from adaptive_span_jax.model import dropout as hashing
from adaptive_span_jax.model.attention.fused.layout import VMEM_BYTES, split
from adaptive_span_jax.model.attention.fused.program import Ref, rows
from adaptive_span_jax.model.attention.fused.sizes import BLOCK
from adaptive_span_jax.model.attention.fused.tiles import TILE, dot, dot_t, iota
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.runtime import sharding

_SUBLANES = 8
_LOG2_E = math.log2(math.e)


def unsupported(head_width: int, vectors: int) -> str | None:
    """Why the kernels cannot read persistent vectors of these sizes, or None if they can; for sizes of fused.attend."""
    if BLOCK % head_width:
        return f"heads of {head_width} do not divide {BLOCK}"
    if vectors % BLOCK:
        return f"model.persistent = {vectors} is not a multiple of {BLOCK}"
    return None


def join(
    context: tuple[jax.Array, jax.Array],
    query_BTHK: jax.Array,
    key_HKU: jax.Array,
    value_HUK: jax.Array,
    dropout: Dropout | None = None,
) -> jax.Array:
    """The average over the context, (output_BTHK, log_sum_BTH), and the persistent vectors: output_BTHK."""
    streams, length, heads, head_width = query_BTHK.shape
    word_BH = jnp.zeros((streams, heads), jnp.uint32)
    if dropout is not None:
        word_BH = dropout.at(dropout.streams(streams)[:, None]).at(jnp.arange(heads)[None, :]).word
    context_BTHK, log_sum_BTH = context
    inputs = _Inputs(
        query_BTHK.reshape(streams, length, -1),
        context_BTHK.reshape(streams, length, -1),
        jnp.moveaxis(log_sum_BTH, 2, 1)[:, :, None],
        key_HKU,
        value_HUK,
        word_BH,
    )
    setting = _Setting(dropout.rate if dropout else 0.0, sharding.platform() != "tpu")
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


class _Kept(NamedTuple):
    output_BTQ: Any
    log_sum_BH1T: Any  # of context and persistent vectors, in base 2


_AXES = _Inputs(0, 0, 0, sharding.REPLICATED, sharding.REPLICATED, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _join(setting: _Setting, inputs: _Inputs) -> jax.Array:
    return _forward(setting, inputs)[0]


def _forward(setting: _Setting, inputs: _Inputs) -> tuple[jax.Array, tuple[_Inputs, _Kept]]:
    def run(inputs: _Inputs) -> _Kept:
        sizes = _Sizes.of(setting, inputs)
        return _Kept(*_call(sizes, "forward", _operands(sizes, inputs), ()))

    streams = inputs.query_BTQ.shape[0]
    kept = sharding.per_device(run, streams, (_AXES,), _Kept(0, 0))(inputs)
    return kept.output_BTQ, (inputs, kept)


def _backward(setting: _Setting, saved: tuple[_Inputs, _Kept], d_output_BTQ: jax.Array) -> tuple[_Inputs]:
    def run(inputs: _Inputs, kept: _Kept, d_output_BTQ: jax.Array) -> _Inputs:
        sizes = _Sizes.of(setting, inputs)
        found = _Gradients(*_call(sizes, "backward", _operands(sizes, inputs), (*kept, d_output_BTQ)))
        d_key_QU, d_value_QU = found.key_CQU.sum(axis=0), found.value_CQU.sum(axis=0)
        return _Inputs(
            found.query_BTQ,
            found.context_BTQ,
            found.log_sum_BH1T,
            d_key_QU.reshape(inputs.key_HKU.shape).astype(inputs.key_HKU.dtype),
            jnp.swapaxes(d_value_QU.reshape(inputs.key_HKU.shape), 1, 2).astype(inputs.value_HUK.dtype),
            None,
        )

    streams = saved[0].query_BTQ.shape[0]
    out_axes = _AXES._replace(key_HKU=sharding.PSUM, value_HUK=sharding.PSUM, word_BH=None)
    return (sharding.per_device(run, streams, (_AXES, _Kept(0, 0), 0), out_axes)(*saved, d_output_BTQ),)


_join.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes of one call on one device."""

    streams: int
    cores: int
    segment: int
    heads: int
    head_width: int
    vectors: int
    dtype: Any
    setting: _Setting

    @classmethod
    def of(cls, setting: _Setting, inputs: _Inputs) -> "_Sizes":
        streams, segment, _ = inputs.query_BTQ.shape
        heads, head_width, vectors = inputs.key_HKU.shape
        cores = sharding.cores_per_device()
        cores = cores if streams % cores == 0 else 1
        return cls(streams, cores, segment, heads, head_width, vectors, inputs.query_BTQ.dtype, setting)

    @property
    def together(self) -> int:
        """Heads of a program."""
        return BLOCK // self.head_width

    @property
    def blocks(self) -> range:
        """Query blocks."""
        return range(self.segment // BLOCK)

    @property
    def scale(self) -> float:
        """By how much a weight counts more than its share: values are scaled by √N, and those kept by dropout."""
        return math.sqrt(self.vectors) / (1 - self.setting.dropout)

    def lanes(self, head: int) -> slice:
        """The lanes, or rows, of one of a program's heads."""
        return slice(head * self.head_width, (head + 1) * self.head_width)


class _Operands(NamedTuple):
    """What both kernels read; Q: all heads side by side."""

    query_BTQ: Any
    context_BTQ: Any
    log_sum_BH1T: Any  # of the context, in base 2
    key_UQ: Any
    value_UQ: Any
    key_QU: Any
    value_QU: Any


class _Residuals(NamedTuple):
    """What the backward kernel reads besides."""

    output_BTQ: Any
    log_sum_BH1T: Any
    d_output_BTQ: Any


class _Gradients(NamedTuple):
    query_BTQ: Any
    context_BTQ: Any
    log_sum_BH1T: Any  # of the context
    key_CQU: Any  # for each core, like those of values: float32
    value_CQU: Any


def _operands(sizes: _Sizes, inputs: _Inputs) -> tuple[jax.Array, _Operands]:
    """(dropout's words, the kernels' operands)."""
    key_QU = inputs.key_HKU.reshape(-1, sizes.vectors)
    value_UQ = jnp.swapaxes(inputs.value_HUK, 0, 1).reshape(sizes.vectors, -1)
    operands = _Operands(
        inputs.query_BTQ,
        inputs.context_BTQ,
        inputs.log_sum_BH1T * _LOG2_E,
        key_QU.T,
        value_UQ,
        key_QU,
        value_UQ.T,
    )
    return inputs.word_BH.reshape(-1), operands


def _call(sizes: _Sizes, kind: str, operands: tuple[jax.Array, _Operands], residuals: tuple) -> Any:
    """One of the kernels, over a grid of (core, heads of a register, stream of the core)."""
    per_core = sizes.streams // sizes.cores

    def by_stream(*block: int) -> pl.BlockSpec:
        """An array whose first axis counts streams: its last axis counts lanes, or its second one heads."""
        if len(block) == 3:
            return pl.BlockSpec(block, lambda core, heads, stream, _: (core * per_core + stream, 0, heads))
        return pl.BlockSpec(block, lambda core, heads, stream, _: (core * per_core + stream, heads, 0, 0))

    width = sizes.heads * sizes.head_width
    activation, row = by_stream(1, sizes.segment, BLOCK), by_stream(1, sizes.together, 1, sizes.segment)
    by_lane = pl.BlockSpec((sizes.vectors, BLOCK), lambda core, heads, stream, _: (0, heads))
    by_row = pl.BlockSpec((BLOCK, sizes.vectors), lambda core, heads, stream, _: (heads, 0))
    per_core_sum = pl.BlockSpec((1, BLOCK, sizes.vectors), lambda core, heads, stream, _: (core, heads, 0))
    activations = jax.ShapeDtypeStruct((sizes.streams, sizes.segment, width), sizes.dtype)
    numbers = jax.ShapeDtypeStruct((sizes.streams, sizes.heads, 1, sizes.segment), jnp.float32)
    sums = jax.ShapeDtypeStruct((sizes.cores, width, sizes.vectors), jnp.float32)
    in_specs = [*_Operands(activation, activation, row, by_lane, by_lane, by_row, by_row)]
    by_head = pltpu.VMEM((sizes.together, BLOCK, sizes.segment), sizes.dtype)
    transposed = pltpu.VMEM((BLOCK, sizes.segment), jnp.float32)
    per_query = pltpu.VMEM((sizes.together, _SUBLANES, sizes.segment), jnp.float32)
    if kind == "forward":
        kernel: Any = _forward_kernel
        out_specs, out_shape = _Kept(activation, row), _Kept(activations, numbers)
        scratch = _ForwardScratch(by_head, transposed, per_query, per_query)
    else:
        kernel = _backward_kernel
        in_specs += _Residuals(activation, row, activation)
        out_specs = _Gradients(activation, activation, row, per_core_sum, per_core_sum)
        out_shape = _Gradients(activations, activations, numbers, sums, sums)
        scratch = _BackwardScratch(by_head, by_head, transposed, per_query, per_query)
    words_N, arrays = operands
    return pl.pallas_call(
        functools.partial(kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sizes.cores, sizes.heads // sizes.together, per_core),
            in_specs=in_specs,
            out_specs=list(out_specs),
            scratch_shapes=list(scratch),
        ),
        out_shape=list(out_shape),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
            disable_bounds_checks=True,
        ),
        interpret=sizes.setting.interpret,
        name=f"persistent_{kind}",
    )(words_N, *arrays, *residuals)


class _ForwardScratch(NamedTuple):
    query_t: Ref  # of each head, zeros in the rows of the others
    output_t: Ref  # Σ of weights after dropout times values, all heads
    top: Ref  # the largest score so far
    total: Ref  # Σ exp(s − top), sublane by sublane


def _forward_kernel(sizes: _Sizes, words_N: Ref, *refs: Ref) -> None:
    inputs, outputs, s = split(refs, _Operands, _Kept, _ForwardScratch)
    words = _query_words(sizes, words_N)
    for i in sizes.blocks:
        _hold_by_head(sizes, s.query_t, _transposed(inputs.query_BTQ, i), i)
        s.output_t[:, rows(i)] = _transposed(inputs.context_BTQ, i) * (1 / sizes.scale)
    for head in range(sizes.together):
        s.top[head] = jnp.broadcast_to(inputs.log_sum_BH1T[0, head], s.top.shape[1:])
    s.total[...] = jnp.full(s.total.shape, 1 / _SUBLANES, jnp.float32)

    def chunk(number: jax.Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(number * BLOCK, BLOCK), BLOCK)
        spread = _spread(number)
        for head in range(sizes.together):
            own = sizes.lanes(head)
            for i in sizes.blocks:
                score = dot(inputs.key_UQ[at, :], s.query_t[head, :, rows(i)]) * _LOG2_E
                before = s.top[head, :, rows(i)]
                top = jnp.maximum(before, jnp.max(score, axis=0, keepdims=True))
                weight, rescale = jnp.exp2(score - top[:1]), jnp.exp2(before - top)
                s.top[head, :, rows(i)] = top
                partial = weight.reshape(-1, _SUBLANES, BLOCK).sum(axis=0)
                s.total[head, :, rows(i)] = s.total[head, :, rows(i)] * rescale + partial
                weight = _drop(sizes, weight, words[head][i], spread).astype(sizes.dtype)
                values = dot(inputs.value_QU[own, at], weight)
                s.output_t[own, rows(i)] = s.output_t[own, rows(i)] * rescale[:1] + values

    lax.fori_loop(0, sizes.vectors // BLOCK, chunk, None)
    for head in range(sizes.together):
        total = jnp.sum(s.total[head], axis=0, keepdims=True)
        outputs.log_sum_BH1T[0, head] = s.top[head, :1] + jnp.log(total) * _LOG2_E
        s.output_t[sizes.lanes(head)] *= sizes.scale / total
    for i in sizes.blocks:
        outputs.output_BTQ[0, rows(i), :] = jnp.transpose(s.output_t[:, rows(i)]).astype(sizes.dtype)


class _BackwardScratch(NamedTuple):
    query_t: Ref
    d_output_t: Ref
    d_query_t: Ref
    log_sum: Ref
    d_dot: Ref  # Σ d_output·output


def _backward_kernel(sizes: _Sizes, words_N: Ref, *refs: Ref) -> None:
    inputs, residuals, grads, s = split(refs, _Operands, _Residuals, _Gradients, _BackwardScratch)
    is_first = pl.program_id(2) == 0
    words = _query_words(sizes, words_N)
    for i in sizes.blocks:
        d_output_t = _transposed(residuals.d_output_BTQ, i)
        context_t, output_t = _transposed(inputs.context_BTQ, i), _transposed(residuals.output_BTQ, i)
        _hold_by_head(sizes, s.query_t, _transposed(inputs.query_BTQ, i), i)
        _hold_by_head(sizes, s.d_output_t, d_output_t, i)
        d_context_t = []
        for head in range(sizes.together):
            own = sizes.lanes(head)
            log_sum = residuals.log_sum_BH1T[0, head, :, rows(i)]
            share = jnp.exp2(inputs.log_sum_BH1T[0, head, :, rows(i)] - log_sum)
            d_dot = jnp.sum(d_output_t[own] * output_t[own], axis=0, keepdims=True)
            d_share = jnp.sum(d_output_t[own] * context_t[own], axis=0, keepdims=True) - d_dot
            grads.log_sum_BH1T[0, head, :, rows(i)] = share * d_share
            d_context_t.append(d_output_t[own] * share)
            # With weights and d_dot scaled like this, nothing else needs to be.
            s.log_sum[head, :, rows(i)] = jnp.broadcast_to(log_sum - math.log2(sizes.scale), (_SUBLANES, BLOCK))
            s.d_dot[head, :, rows(i)] = jnp.broadcast_to(d_dot * (1 / sizes.scale), (_SUBLANES, BLOCK))
        grads.context_BTQ[0, rows(i), :] = jnp.transpose(jnp.concatenate(d_context_t)).astype(sizes.dtype)
    s.d_query_t[...] = jnp.zeros(s.d_query_t.shape, jnp.float32)

    def chunk(number: jax.Array, _: None) -> None:
        at = pl.ds(pl.multiple_of(number * BLOCK, BLOCK), BLOCK)
        spread = _spread(number)
        for head in range(sizes.together):
            own = sizes.lanes(head)
            d_key = jnp.where(is_first, 0.0, grads.key_CQU[0, own, at])
            d_value = jnp.where(is_first, 0.0, grads.value_CQU[0, own, at])
            for i in sizes.blocks:
                score = dot(inputs.key_UQ[at, :], s.query_t[head, :, rows(i)]) * _LOG2_E
                d_weight = dot(inputs.value_UQ[at, :], s.d_output_t[head, :, rows(i)])
                weight = jnp.exp2(score - s.log_sum[head, :1, rows(i)])
                kept = _drop(sizes, weight, words[head][i], spread)
                d_score = (kept * d_weight - weight * s.d_dot[head, :1, rows(i)]).astype(sizes.dtype)
                s.d_query_t[own, rows(i)] += dot(inputs.key_QU[own, at], d_score)
                d_key += dot_t(s.query_t[head, own, rows(i)], d_score)
                d_value += dot_t(s.d_output_t[head, own, rows(i)], kept.astype(sizes.dtype))
            grads.key_CQU[0, own, at] = d_key
            grads.value_CQU[0, own, at] = d_value

    lax.fori_loop(0, sizes.vectors // BLOCK, chunk, None)
    for i in sizes.blocks:
        grads.query_BTQ[0, rows(i), :] = jnp.transpose(s.d_query_t[:, rows(i)]).astype(sizes.dtype)


def _transposed(ref_BTQ: Ref, i: int) -> jax.Array:
    """A query block, transposed: [128, 128 queries], in float32."""
    return jnp.transpose(ref_BTQ[0, rows(i), :].astype(jnp.float32))


def _hold_by_head(sizes: _Sizes, ref: Ref, rows_t: jax.Array, i: int) -> None:
    """Writes a transposed query block once for each head: a product over all 128 rows is then the head's own."""
    for head in range(sizes.together):
        own = sizes.lanes(head)
        is_own = (iota(0) >= own.start) & (iota(0) < own.stop)
        ref[head, :, rows(i)] = jnp.where(is_own, rows_t, 0.0).astype(sizes.dtype)


def _query_words(sizes: _Sizes, words_N: Ref) -> list[list[jax.Array]]:
    """Dropout's words of the queries of each head and query block: rows."""
    stream = pl.program_id(0) * (sizes.streams // sizes.cores) + pl.program_id(2)
    first = stream * sizes.heads + pl.program_id(1) * sizes.together
    return [
        [hashing.mix(words_N[first + head] ^ hashing.spread(iota(1, (1, BLOCK)) + i * BLOCK)) for i in sizes.blocks]
        for head in range(sizes.together)
    ]


def _spread(chunk: jax.Array) -> jax.Array:
    """The numbers of a chunk's vectors, as dropout folds them into a word."""
    return hashing.spread(iota(0) + chunk * BLOCK)


def _drop(sizes: _Sizes, weight: jax.Array, word: jax.Array, spread: jax.Array) -> jax.Array:
    rate = sizes.setting.dropout
    return jnp.where(hashing.kept(hashing.mix(word ^ spread), rate), weight, 0.0) if rate else weight
