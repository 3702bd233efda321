"""The kernels for persistent vectors, one forward and one backward.

A program handles one stream and the heads that share a register: two of width 64. It continues the softmax over the
context, given by its average and log-sum-exp, with the persistent vectors, 128 at a time. Scores are held transposed,
[vectors, queries]: what belongs to a query is then a row, and sums over vectors need no exchange between lanes.

As in forward.py, the loop is software-pipelined by hand: while the vector units compute the softmax of one chunk, the
matrix units compute the scores of the next and the products with the weights of the one before.

Streams are the innermost axis of the grid, so a head's vectors and their gradients stay in VMEM for all streams.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from adaptive_span_jax.model import dropout
from adaptive_span_jax.model.attention.fused import layout
from adaptive_span_jax.model.attention.fused.program import Ref, rows
from adaptive_span_jax.model.attention.fused.sizes import BLOCK
from adaptive_span_jax.model.attention.fused.tiles import TILE, dot, dot_t, iota

_SUBLANES = 8
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one call on one device."""

    streams: int
    cores: int
    segment: int
    heads: int
    head_width: int
    vectors: int
    dtype: Any
    dropout: float
    interpret: bool

    @property
    def together(self) -> range:
        """The heads of a program."""
        return range(BLOCK // self.head_width)

    @property
    def blocks(self) -> range:
        """Query blocks."""
        return range(self.segment // BLOCK)

    @property
    def last(self) -> int:
        """The number of the last chunk of vectors."""
        return self.vectors // BLOCK - 1

    @property
    def scale(self) -> float:
        """What weights are multiplied by: √N, by which values are scaled, and the scale of dropout."""
        return math.sqrt(self.vectors) / (1 - self.dropout)

    def own(self, head: int) -> slice:
        """The lanes, or rows if transposed, of one of a program's heads."""
        return slice(head * self.head_width, (head + 1) * self.head_width)


class Operands(NamedTuple):
    """What both kernels read. Q: all heads side by side."""

    query_BTQ: Any
    context_BTQ: Any
    log_sum_BH1T: Any  # of the context, in base 2
    key_UQ: Any
    value_UQ: Any
    key_QU: Any
    value_QU: Any


class Outputs(NamedTuple):
    """What the forward kernel writes."""

    output_BTQ: Any
    log_sum_BH1T: Any  # of context and persistent vectors, in base 2


class _Residuals(NamedTuple):
    """What the backward kernel reads besides the operands."""

    output_BTQ: Any
    log_sum_BH1T: Any
    d_output_BTQ: Any


class Gradients(NamedTuple):
    """What the backward kernel writes."""

    query_BTQ: Any
    context_BTQ: Any
    log_sum_BH1T: Any  # of the context, as a natural logarithm
    key_CQU: Any  # for each core: float32
    value_CQU: Any  # the same


# ------------------------------------------------------------------------------------------------------------- calls


def forward(sizes: Sizes, words_N: jax.Array, operands: Operands) -> Outputs:
    """The average over context and persistent vectors; words_N: dropout's, N = stream · H + head."""
    specs = _Specs.of(sizes)
    out_specs = Outputs(specs.activation, specs.row)
    out_shape = Outputs(operands.query_BTQ, operands.log_sum_BH1T)
    call = _call(sizes, _forward_kernel, specs.operands, out_specs, out_shape, _ForwardScratch.shapes(sizes))
    return Outputs(*call(words_N, *operands))


def backward(
    sizes: Sizes, words_N: jax.Array, operands: Operands, outputs: Outputs, d_output_BTQ: jax.Array
) -> Gradients:
    """The gradients, given that of the output."""
    specs = _Specs.of(sizes)
    vectors = jax.ShapeDtypeStruct((sizes.cores, *operands.key_QU.shape), jnp.float32)
    in_specs = (*specs.operands, *_Residuals(specs.activation, specs.row, specs.activation))
    out_specs = Gradients(specs.activation, specs.activation, specs.row, specs.sums, specs.sums)
    out_shape = Gradients(*operands[:3], vectors, vectors)
    call = _call(sizes, _backward_kernel, in_specs, out_specs, out_shape, _BackwardScratch.shapes(sizes))
    return Gradients(*call(words_N, *operands, *outputs, d_output_BTQ))


class _Specs(NamedTuple):
    """Blocks of a program. The grid is (core, heads of a register, stream of the core)."""

    activation: Any
    row: Any  # one number per query of each head
    by_lane: Any
    by_row: Any
    sums: Any

    @classmethod
    def of(cls, sizes: Sizes) -> "_Specs":
        per_core, together = sizes.streams // sizes.cores, len(sizes.together)

        def spec(shape: tuple[int, ...], index: Callable[..., tuple]) -> pl.BlockSpec:
            return pl.BlockSpec(shape, lambda core, heads, stream, _: index(core, heads, core * per_core + stream))

        return cls(
            activation=spec((1, sizes.segment, BLOCK), lambda core, heads, stream: (stream, 0, heads)),
            row=spec((1, together, 1, sizes.segment), lambda core, heads, stream: (stream, heads, 0, 0)),
            by_lane=spec((sizes.vectors, BLOCK), lambda core, heads, stream: (0, heads)),
            by_row=spec((BLOCK, sizes.vectors), lambda core, heads, stream: (heads, 0)),
            sums=spec((1, BLOCK, sizes.vectors), lambda core, heads, stream: (core, heads, 0)),
        )

    @property
    def operands(self) -> Operands:
        return Operands(
            self.activation, self.activation, self.row, self.by_lane, self.by_lane, self.by_row, self.by_row
        )


def _call(
    sizes: Sizes, kernel: Callable, in_specs: tuple, out_specs: tuple, out_shape: tuple, scratch: tuple
) -> Callable:
    return pl.pallas_call(
        functools.partial(kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(sizes.cores, sizes.heads // len(sizes.together), sizes.streams // sizes.cores),
            in_specs=list(in_specs),
            out_specs=list(out_specs),
            scratch_shapes=list(scratch),
        ),
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in out_shape],
        compiler_params=layout.compiler_params(),
        interpret=sizes.interpret,
        name=f"persistent{kernel.__name__.removesuffix('_kernel')}",
    )


def vmem_bytes(segment: int, head_width: int, vectors: int, dtype: DTypeLike) -> int:
    """What the backward kernel takes of a core's VMEM: more than the forward kernel."""
    compute, full = jnp.dtype(dtype).itemsize, jnp.dtype(jnp.float32).itemsize
    heads = BLOCK // head_width
    # The pipeline has two buffers of each: activations, vectors and their gradients.
    buffered = 6 * compute * segment + (4 * compute + 2 * full) * vectors
    scratch = (full + heads * (2 * full + 4 * compute)) * segment
    return BLOCK * (2 * buffered + scratch)


# ----------------------------------------------------------------------------------------------------------- forward


class _ForwardScratch(NamedTuple):
    """VMEM of a program, for each head; _t: transposed."""

    query_t: Ref
    score: Ref  # [head, query block, 128 vectors, 128 queries], in base 2
    weight: Ref  # after dropout, of the chunk before
    top: Ref  # the running softmax: the largest score so far, in every sublane,
    next_top: Ref  # that with the scores of the next chunk,
    total: Ref  # Σ exp(s − top), sublane by sublane,
    output_t: Ref  # Σ of weights after dropout times values, of all heads, without the chunk before

    @staticmethod
    def shapes(sizes: Sizes) -> "_ForwardScratch":
        per_query = _per_query(sizes)
        return _ForwardScratch(
            query_t=_by_head(sizes),
            score=_tiles(sizes, jnp.float32),
            weight=_tiles(sizes, sizes.dtype),
            top=per_query,
            next_top=per_query,
            total=per_query,
            output_t=_all_heads(sizes),
        )


def _forward_kernel(sizes: Sizes, words_N: Ref, *refs: Ref) -> None:
    inputs, outputs, s = layout.split(refs, Operands, Outputs, _ForwardScratch)
    words = _query_words(sizes, words_N)

    def scores(chunk: jax.Array | int, head: int, i: int) -> None:
        score = dot(inputs.key_UQ[_vectors(chunk), :], s.query_t[head, :, rows(i)]) * _LOG2_E
        s.score[head, i] = score
        s.next_top[head, :, rows(i)] = jnp.maximum(s.top[head, :, rows(i)], jnp.max(score, axis=0, keepdims=True))

    def with_values(chunk: jax.Array | int, head: int, i: int) -> jax.Array:
        values_t = inputs.value_QU[sizes.own(head), _vectors(chunk)]
        return s.output_t[sizes.own(head), rows(i)] + dot(values_t, s.weight[head, i])

    def softmax(chunk: jax.Array, _: None) -> None:
        spread = _spread(chunk)
        for head in sizes.together:
            for i in sizes.blocks:
                output_t = with_values(jnp.maximum(chunk - 1, 0), head, i)
                top = s.next_top[head, :, rows(i)]
                weight, rescale = jnp.exp2(s.score[head, i] - top[:1]), jnp.exp2(s.top[head, :, rows(i)] - top)
                s.top[head, :, rows(i)] = top
                s.total[head, :, rows(i)] = s.total[head, :, rows(i)] * rescale + _sum_by_sublane(weight)
                # Dropout acts after normalizing, so the total counts dropped weights too.
                s.weight[head, i] = _drop(sizes, weight, words[head][i], spread).astype(sizes.dtype)
                s.output_t[sizes.own(head), rows(i)] = output_t * rescale[:1]
                scores(jnp.minimum(chunk + 1, sizes.last), head, i)

    s.total[...] = jnp.full(s.total.shape, 1 / _SUBLANES, jnp.float32)  # that of the context: exp(log-sum − top)
    for head in sizes.together:
        s.top[head] = jnp.broadcast_to(inputs.log_sum_BH1T[0, head], s.top.shape[1:])
    for i in sizes.blocks:
        query_t = _transposed(inputs.query_BTQ, i)
        s.output_t[:, rows(i)] = _transposed(inputs.context_BTQ, i) * (1 / sizes.scale)
        for head in sizes.together:
            s.query_t[head, :, rows(i)] = _only(sizes, query_t, head)
            s.weight[head, i] = jnp.zeros(TILE, sizes.dtype)
    for head in sizes.together:
        for i in sizes.blocks:
            scores(0, head, i)
    lax.fori_loop(0, sizes.last + 1, softmax, None)
    for head in sizes.together:
        total = jnp.sum(s.total[head], axis=0, keepdims=True)
        outputs.log_sum_BH1T[0, head] = s.top[head, :1] + jnp.log(total) * _LOG2_E
        for i in sizes.blocks:
            output_t = with_values(sizes.last, head, i)
            s.output_t[sizes.own(head), rows(i)] = output_t * (sizes.scale / total[:, rows(i)])
    for i in sizes.blocks:
        outputs.output_BTQ[0, rows(i), :] = jnp.transpose(s.output_t[:, rows(i)]).astype(sizes.dtype)


# ---------------------------------------------------------------------------------------------------------- backward


class _BackwardScratch(NamedTuple):
    """VMEM of a program, as in `_ForwardScratch`."""

    query_t: Ref
    d_output_t: Ref
    score: Ref
    d_weight: Ref
    d_score: Ref  # of the chunk before
    weight: Ref  # of the chunk before, after dropout
    log_sum: Ref
    d_dot: Ref  # Σ d_output·output
    d_total: Ref  # the persistent vectors' part of it, sublane by sublane
    d_query_t: Ref

    @staticmethod
    def shapes(sizes: Sizes) -> "_BackwardScratch":
        per_query = _per_query(sizes)
        return _BackwardScratch(
            query_t=_by_head(sizes),
            d_output_t=_by_head(sizes),
            score=_tiles(sizes, jnp.float32),
            d_weight=_tiles(sizes, jnp.float32),
            d_score=_tiles(sizes, sizes.dtype),
            weight=_tiles(sizes, sizes.dtype),
            log_sum=per_query,
            d_dot=per_query,
            d_total=per_query,
            d_query_t=_all_heads(sizes),
        )


def _backward_kernel(sizes: Sizes, words_N: Ref, *refs: Ref) -> None:
    inputs, residuals, grads, s = layout.split(refs, Operands, _Residuals, Gradients, _BackwardScratch)
    words = _query_words(sizes, words_N)
    is_first = pl.program_id(2) == 0

    def prepare(i: int) -> None:
        query_t, d_output_t = _transposed(inputs.query_BTQ, i), _transposed(residuals.d_output_BTQ, i)
        context_t, output_t = _transposed(inputs.context_BTQ, i), _transposed(residuals.output_BTQ, i)
        d_context_t = []
        for head in sizes.together:
            own = sizes.own(head)
            s.query_t[head, :, rows(i)] = _only(sizes, query_t, head)
            s.d_output_t[head, :, rows(i)] = _only(sizes, d_output_t, head)
            s.weight[head, i] = s.d_score[head, i] = jnp.zeros(TILE, sizes.dtype)
            scores(0, head, i)
            log_sum = residuals.log_sum_BH1T[0, head, :, rows(i)]
            share = jnp.exp2(inputs.log_sum_BH1T[0, head, :, rows(i)] - log_sum)
            d_context_t.append(d_output_t[own] * share)
            d_dot = jnp.sum(d_output_t[own] * output_t[own], axis=0, keepdims=True)
            # With weights and d_dot scaled like this, values and dropout need no scale of their own.
            s.log_sum[head, :, rows(i)] = jnp.broadcast_to(log_sum - math.log2(sizes.scale), (_SUBLANES, BLOCK))
            s.d_dot[head, :, rows(i)] = jnp.broadcast_to(d_dot * (1 / sizes.scale), (_SUBLANES, BLOCK))
            # Not the difference of Σ d_output·context and d_dot: the output was rounded.
            d_share = jnp.sum(d_output_t[own] * context_t[own], axis=0, keepdims=True)
            grads.log_sum_BH1T[0, head, :, rows(i)] = d_share * (1 - share)  # without d_total
        grads.context_BTQ[0, rows(i), :] = jnp.transpose(jnp.concatenate(d_context_t)).astype(sizes.dtype)

    def scores(chunk: jax.Array | int, head: int, i: int) -> None:
        at = _vectors(chunk)
        s.score[head, i] = dot(inputs.key_UQ[at, :], s.query_t[head, :, rows(i)]) * _LOG2_E
        s.d_weight[head, i] = dot(inputs.value_UQ[at, :], s.d_output_t[head, :, rows(i)])

    def products(chunk: jax.Array | int, head: int) -> None:
        at, own = _vectors(chunk), sizes.own(head)
        # Selected rather than cleared before: cheaper than a branch.
        d_key_t = jnp.where(is_first, 0.0, grads.key_CQU[0, own, at])
        d_value_t = jnp.where(is_first, 0.0, grads.value_CQU[0, own, at])
        for i in sizes.blocks:
            s.d_query_t[own, rows(i)] += dot(inputs.key_QU[own, at], s.d_score[head, i])
            d_key_t += dot_t(s.query_t[head, own, rows(i)], s.d_score[head, i])
            d_value_t += dot_t(s.d_output_t[head, own, rows(i)], s.weight[head, i])
        grads.key_CQU[0, own, at], grads.value_CQU[0, own, at] = d_key_t, d_value_t

    def softmax(chunk: jax.Array, _: None) -> None:
        spread = _spread(chunk)
        for head in sizes.together:
            products(jnp.maximum(chunk - 1, 0), head)  # of zeros at first, and then of this chunk once more
            for i in sizes.blocks:
                weight = jnp.exp2(s.score[head, i] - s.log_sum[head, :1, rows(i)])
                kept = _drop(sizes, weight, words[head][i], spread)
                d_kept = kept * s.d_weight[head, i]
                s.d_total[head, :, rows(i)] += _sum_by_sublane(d_kept)
                d_score = d_kept - weight * s.d_dot[head, :1, rows(i)]
                s.d_score[head, i], s.weight[head, i] = d_score.astype(sizes.dtype), kept.astype(sizes.dtype)
                scores(jnp.minimum(chunk + 1, sizes.last), head, i)

    for ref in (s.d_query_t, s.d_total):
        ref[...] = jnp.zeros(ref.shape, jnp.float32)
    for i in sizes.blocks:
        prepare(i)
    lax.fori_loop(0, sizes.last + 1, softmax, None)
    for head in sizes.together:
        products(sizes.last, head)
        share = jnp.exp2(inputs.log_sum_BH1T[0, head] - residuals.log_sum_BH1T[0, head])
        d_total = jnp.sum(s.d_total[head], axis=0, keepdims=True)
        grads.log_sum_BH1T[0, head] = share * (grads.log_sum_BH1T[0, head] - d_total)
    for i in sizes.blocks:
        grads.query_BTQ[0, rows(i), :] = jnp.transpose(s.d_query_t[:, rows(i)]).astype(sizes.dtype)


# ------------------------------------------------------------------------------------------- what both kernels use


def _by_head(sizes: Sizes) -> Ref:
    """Transposed queries, of each head with zeros in the rows of the others: products are over all 128 rows."""
    return pltpu.VMEM((len(sizes.together), BLOCK, sizes.segment), sizes.dtype)


def _all_heads(sizes: Sizes) -> Ref:
    return pltpu.VMEM((BLOCK, sizes.segment), jnp.float32)


def _tiles(sizes: Sizes, dtype: DTypeLike) -> Ref:
    return pltpu.VMEM((len(sizes.together), len(sizes.blocks), *TILE), dtype)


def _per_query(sizes: Sizes) -> Ref:
    return pltpu.VMEM((len(sizes.together), _SUBLANES, sizes.segment), jnp.float32)


def _transposed(ref_BTQ: Ref, i: int) -> jax.Array:
    """A query block: [128 lanes, 128 queries], in float32."""
    return jnp.transpose(ref_BTQ[0, rows(i), :].astype(jnp.float32))


def _only(sizes: Sizes, rows_t: jax.Array, head: int) -> jax.Array:
    """A head's rows of a transposed query block, zeros elsewhere."""
    own = sizes.own(head)
    return jnp.where((iota(0) >= own.start) & (iota(0) < own.stop), rows_t, 0.0).astype(sizes.dtype)


def _vectors(chunk: jax.Array | int) -> Any:
    return pl.ds(pl.multiple_of(chunk * BLOCK, BLOCK), BLOCK)


def _sum_by_sublane(tile: jax.Array) -> jax.Array:
    return tile.reshape(-1, _SUBLANES, BLOCK).sum(axis=0)


def _query_words(sizes: Sizes, words_N: Ref) -> list[list[jax.Array]]:
    """Dropout's words of the queries of each head and query block: [1, 128]."""
    stream = pl.program_id(0) * (sizes.streams // sizes.cores) + pl.program_id(2)
    first = stream * sizes.heads + pl.program_id(1) * len(sizes.together)
    query = iota(1, (1, BLOCK))
    return [
        [dropout.mix(words_N[first + head] ^ dropout.spread(query + i * BLOCK)) for i in sizes.blocks]
        for head in sizes.together
    ]


def _spread(chunk: jax.Array) -> jax.Array:
    """The numbers of a chunk's vectors, as dropout folds them into a word."""
    return dropout.spread(iota(0) + chunk * BLOCK)


def _drop(sizes: Sizes, weight: jax.Array, word: jax.Array, spread: jax.Array) -> jax.Array:
    if not sizes.dropout:
        return weight
    return jnp.where(dropout.kept(dropout.mix(word ^ spread), sizes.dropout), weight, 0.0)
