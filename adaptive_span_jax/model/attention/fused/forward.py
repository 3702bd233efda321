"""The forward kernel: output and log-sum-exp of every query.

A step is software-pipelined by hand, because the compiler overlaps work only within a step. While the vector units
compute the softmax of step d, the matrix units compute the scores of step d + 1, add up the values of step d − 1, and
project the memory block that step d + 2 reads.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adaptive_span_jax.model.attention.fused import layout
from adaptive_span_jax.model.attention.fused.program import Blocks, Program, Ref, Scalars, rows
from adaptive_span_jax.model.attention.fused.sizes import AHEAD, BLOCK, HALVES, Sizes
from adaptive_span_jax.model.attention.fused.tiles import TILE, dot, dot_t, in_newer_block, iota, row, skew

# Stands for the logarithm of 0: far below any score, but finite, so that no difference is NaN.
_LOWEST = -1e30


class _Outputs(NamedTuple):
    output_BTQ: Ref
    log_sum_BH1T: Ref


class _Scratch(NamedTuple):
    """VMEM of a program. I: query blocks; tiles are [128, 128]."""

    hidden_XJD: Ref
    semaphore_X: Ref
    distance: Ref
    spread: Ref
    step_spread: Ref  # uint32, of the current step
    query_I: Ref
    word_I: Ref  # uint32
    kv: Ref  # projected blocks [slots, 128, E]; that of key block n is in slot n mod slots
    position_I: Ref  # position scores, of step d + 1 after they are computed in step d
    content_I: Ref  # content scores with the older key block of a step, which is the newer one of the next
    score_I: Ref  # scores, of step d when step d begins and of step d + 1 when it ends
    top_I: Ref  # the running softmax: the largest score so far, the same in every lane,
    total_I: Ref  # Σ m·exp(s − top), lane by lane,
    output_I: Ref  # Σ of weights after dropout times values, without the values of the step before
    weight_I: Ref  # of the step before, after dropout: those with j ≥ c are still to be used
    tile_I: Ref  # weights on key block i − d, in the compute dtype; step d + 1 takes their product with its values

    @staticmethod
    def shapes(sizes: Sizes, dtype: jnp.dtype, memory_dtype: jnp.dtype) -> "_Scratch":
        def tile(dtype: Any = jnp.float32) -> Ref:
            return pltpu.VMEM((sizes.blocks, *TILE), dtype)

        return _Scratch(
            hidden_XJD=pltpu.VMEM((AHEAD, BLOCK, sizes.width), memory_dtype),
            semaphore_X=pltpu.SemaphoreType.DMA((AHEAD,)),
            distance=pltpu.VMEM(TILE, jnp.float32),
            spread=pltpu.VMEM(TILE, jnp.uint32),
            step_spread=pltpu.VMEM(TILE, jnp.uint32),
            query_I=tile(dtype),
            word_I=tile(jnp.uint32),
            kv=pltpu.VMEM((sizes.slots, BLOCK, 2 * sizes.part), dtype),
            position_I=tile(),
            content_I=tile(),
            score_I=tile(),
            top_I=tile(),
            total_I=tile(),
            output_I=tile(),
            weight_I=tile(),
            tile_I=tile(dtype),
        )


def forward(sizes: Sizes, scalars: Scalars, inputs: layout.Operands) -> tuple[jax.Array, jax.Array]:
    """(output_BTQ, the log-sum-exp in base 2: [B, H, 1, T])."""
    query_BTQ, memory = inputs.query_BTQ, inputs.memory_LBMD
    scratch = _Scratch.shapes(sizes, query_BTQ.dtype, memory.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=layout.grid(sizes),
            in_specs=layout.operand_specs(sizes),
            out_specs=[layout.by_stream(sizes), layout.by_query(sizes)],
            scratch_shapes=list(scratch),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(query_BTQ.shape, query_BTQ.dtype),
            jax.ShapeDtypeStruct((sizes.streams, sizes.heads, 1, sizes.segment), jnp.float32),
        ],
        compiler_params=layout.compiler_params(),
        interpret=sizes.interpret,
        name="span_forward",
    )(*scalars, *inputs)


def _kernel(sizes: Sizes, *refs: Ref) -> None:
    _Forward(sizes, *layout.split(refs, Scalars, layout.Operands, _Outputs, _Scratch)).run()


class _Forward(Program):
    def __init__(self, sizes: Sizes, scalars: Scalars, inputs: layout.Operands, outputs: _Outputs, s: _Scratch):
        blocks = Blocks(inputs.memory_LBMD, s.hidden_XJD, s.semaphore_X)
        super().__init__(sizes, scalars, inputs.weights_DE, blocks, s.distance, s.spread)
        self.inputs, self.outputs, self.s = inputs, outputs, s
        self.dtype = inputs.query_BTQ.dtype

    def short_head(self) -> None:
        s, blocks = self.s, range(self.sizes.blocks)
        self.start_next_program()
        masks = self._log_masks(jnp.int32(0))
        s.step_spread[...] = self.spread[...]
        for i in blocks:
            s.query_I[i] = self.take(self.inputs.query_BTQ, i, 0).astype(self.dtype)
        for i in blocks:
            self._position_scores(jnp.int32(0), i)
        for i in blocks:
            keys = layout.short_keys(self.inputs, i)
            content = [dot_t(s.query_I[i, half], layout.key(keys[number])) for number, half in enumerate(HALVES)]
            s.score_I[i] = jnp.concatenate(content) + s.position_I[i] + masks[i]
        for i in blocks:
            score = s.score_I[i]
            top = jnp.maximum(jnp.max(score, axis=1, keepdims=True), _LOWEST / 2)
            weight = jnp.exp2(score - top)
            s.top_I[i] = jnp.broadcast_to(top, TILE)
            s.total_I[i] = jnp.broadcast_to(jnp.sum(weight, axis=1, keepdims=True), TILE)
            words = self.query_words(iota(0) + i * BLOCK)
            s.tile_I[i] = self._drop(weight, words, s.step_spread[...]).astype(self.dtype)
        for i in blocks:
            keys = layout.short_keys(self.inputs, i)
            output = [dot(s.tile_I[i, half], layout.value(keys[number])) for number, half in enumerate(HALVES)]
            self._finish(i, jnp.concatenate(output), s.top_I[i], s.total_I[i])

    def begin(self) -> None:
        s, blocks = self.s, range(self.sizes.blocks)
        s.kv[self.slot(-1)] = self.inputs.newest_BJE[0]
        # Step 0 adds up no values of a step before it: zero weights, with a block that must not hold NaN.
        s.kv[self.slot(self.sizes.blocks)] = jnp.zeros(s.kv.shape[1:], self.dtype)
        for i in blocks:
            s.query_I[i] = self.take(self.inputs.query_BTQ, i, 0).astype(self.dtype)
            s.word_I[i] = self.query_words(iota(0) + i * BLOCK)
            s.kv[i] = self.inputs.segment_BTE[0, rows(i), :]
            s.content_I[i] = dot_t(s.query_I[i], layout.key(s.kv[i]))
            s.top_I[i] = jnp.full(TILE, _LOWEST / 2, jnp.float32)
            for tiles in (s.total_I, s.output_I, s.weight_I, s.tile_I):
                tiles[i] = jnp.zeros(TILE, tiles.dtype)
        for i in blocks:
            self._position_scores(jnp.int32(0), i)
        for i in blocks:
            self._scores(jnp.int32(0), i)
        self.wait(1)
        self._project(1)

    def step(self, step: jax.Array, *, masked: bool) -> None:
        self.advance_copies(step)
        self.s.step_spread[...] = self.spread_distance(step)
        masks = self._log_masks(step) if masked else None
        blocks = range(self.sizes.blocks)
        for i in blocks:
            self._position_scores(step + 1, i)
        for pair in self.sizes.pairs:
            for i in pair:
                self._softmax(step, i, masks[i] if masks else None)
            for i in pair:
                self._scores(step + 1, i)
        self._project(step + 2)

    def end(self, step: jax.Array) -> None:
        s = self.s
        s.step_spread[...] = self.spread_distance(step)
        self.start_next_program()
        masks = self._log_masks(step)
        for i in range(self.sizes.blocks):
            self._softmax(step, i, masks[i])
        for i in range(self.sizes.blocks):
            carried = jnp.where(in_newer_block(), 0.0, s.weight_I[i]).astype(self.dtype)
            output = s.output_I[i] + self._values(step, i) + dot(carried, layout.value(s.kv[self.slot(i - step - 1)]))
            self._finish(i, output, s.top_I[i], jnp.sum(s.total_I[i], axis=1, keepdims=True))

    def _position_scores(self, step: jax.Array, i: int) -> None:
        # One step too far is computed, and not used, where the walk reaches the table's end.
        table = self.inputs.table_XKJ[jnp.minimum(step, self.sizes.distance_blocks - 1)]
        self.s.position_I[i] = skew(dot(self.s.query_I[i], table), self.sizes.interpret)

    def _scores(self, step: jax.Array, i: int) -> None:
        s = self.s
        content = dot_t(s.query_I[i], layout.key(s.kv[self.slot(i - step - 1)]))
        s.score_I[i] = jnp.where(in_newer_block(), s.content_I[i], content) + s.position_I[i]
        s.content_I[i] = content

    def _softmax(self, step: jax.Array, i: int, log_mask: jax.Array | None) -> None:
        s = self.s
        values = self._values(step - 1, i)
        score = s.score_I[i] if log_mask is None else s.score_I[i] + log_mask
        before = s.top_I[i]
        top = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
        weight, rescale = jnp.exp2(score - top), jnp.exp2(before - top)
        s.top_I[i] = top
        s.total_I[i] = s.total_I[i] * rescale + weight
        # Dropout acts after normalizing, so the total counts dropped weights too.
        weight = self._drop(weight, s.word_I[i], s.step_spread[...])
        s.output_I[i] = (s.output_I[i] + values) * rescale
        s.tile_I[i] = jnp.where(in_newer_block(), weight, s.weight_I[i] * rescale).astype(self.dtype)
        s.weight_I[i] = weight

    def _values(self, step: jax.Array, i: int) -> jax.Array:
        """What a step's tile reads of its key block."""
        return dot(self.s.tile_I[i], layout.value(self.s.kv[self.slot(i - step)]))

    def _project(self, step: jax.Array | int) -> None:
        self.s.kv[self.slot(-1 - step)] = self.project(step)

    def _log_masks(self, step: jax.Array) -> list[jax.Array]:
        masks = self.masks(step, self.inputs.z_BH1T)
        return [jnp.where(mask > 0, jnp.log2(jnp.maximum(mask, 1e-30)), _LOWEST) for mask, _ in masks]

    def _drop(self, weight: jax.Array, word: jax.Array, spread: jax.Array) -> jax.Array:
        return jnp.where(self.kept(word, spread), weight, 0.0) if self.sizes.dropout else weight

    def _finish(self, i: int, output: jax.Array, top: jax.Array, total: jax.Array) -> None:
        total = jnp.where(total > 0, total, 1.0)  # a query that sees no key at all
        output *= (1 / (1 - self.sizes.dropout)) / total
        self.put(self.outputs.output_BTQ, i, self.sizes.part % BLOCK, output)
        # The logarithm of a row takes one register, that of a column sixteen.
        self.outputs.log_sum_BH1T[0, 0, :, rows(i)] = row(top) + jnp.log(row(total)) * math.log2(math.e)
