"""The backward kernel: gradients of queries, keys, values, projections, position table and z.

It walks like the forward kernel and computes every weight again, from its score and the query's log-sum-exp. Given
that, a step needs nothing of other steps but what they carry to it. While the vector units turn the scores of step d
into gradients, the matrix units compute the scores of step d + 1 and project the memory block that step d + 2 reads.

Gradients of queries, keys, values and table are accumulated transposed, [K, 128]: then the tiles of score gradients are
the stationary operands of every product, and only K rows stream past them. A key block's gradient is complete when the
last query block has passed it. That of the segment is written out. That of memory has nowhere to go but to the
projections, so it is multiplied with the block's hidden states on the spot.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adaptive_span_jax.model.attention.fused import layout
from adaptive_span_jax.model.attention.fused.backward_arrays import Gradients, Residuals, Scratch
from adaptive_span_jax.model.attention.fused.program import Blocks, Program, Ref, Scalars, rows
from adaptive_span_jax.model.attention.fused.sizes import BLOCK, HALVES, SHORT, Sizes
from adaptive_span_jax.model.attention.fused.tiles import (
    TILE,
    column,
    dot,
    dot_t,
    flip,
    in_newer_block,
    iota,
    skew,
    unskew_flipped,
)

# Where the ramp ends the mask is 0 but its derivative is not, and the score there is unbounded.
_LARGEST_EXPONENT = math.log2(float(jnp.finfo(jnp.float32).max)) / 2


def backward(sizes: Sizes, scalars: Scalars, inputs: layout.Operands, residuals: Residuals) -> Gradients:
    """The gradients, given that of the output."""
    query_BTQ = inputs.query_BTQ
    weights = (sizes.heads, 2 * sizes.rows, sizes.width)
    table = (sizes.distance_blocks, sizes.rows, BLOCK)
    found = pl.pallas_call(
        functools.partial(_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=layout.grid(sizes),
            in_specs=[
                *layout.operand_specs(sizes),
                *Residuals(
                    layout.by_stream(sizes),
                    layout.by_query(sizes, residuals.log_sum_BHRT.shape[2]),
                    layout.by_stream(sizes),
                ),
            ],
            out_specs=list(
                Gradients(
                    query_BTQ=layout.by_stream(sizes),
                    segment_BTE=layout.by_head(sizes, sizes.segment),
                    newest_BJE=layout.by_head(sizes, BLOCK),
                    weights_CHED=layout.per_core(weights),
                    table_CXKJ=layout.per_core(table),
                    z_BH1T=layout.by_query(sizes),
                )
            ),
            scratch_shapes=list(Scratch.shapes(sizes, query_BTQ.dtype, inputs.memory_LBMD.dtype)),
        ),
        out_shape=list(
            Gradients(
                *(_like(array) for array in (query_BTQ, inputs.segment_BTE, inputs.newest_BJE)),
                weights_CHED=jax.ShapeDtypeStruct((sizes.cores, *weights), jnp.float32),
                table_CXKJ=jax.ShapeDtypeStruct((sizes.cores, *table), jnp.float32),
                z_BH1T=_like(inputs.z_BH1T),
            )
        ),
        compiler_params=layout.compiler_params(),
        interpret=sizes.interpret,
        name="span_backward",
    )(*scalars, *inputs, *residuals)
    return Gradients(*found)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _kernel(sizes: Sizes, *refs: Ref) -> None:
    _Backward(sizes, *layout.split(refs, Scalars, layout.Operands, Residuals, Gradients, Scratch)).run()


class _Backward(Program):
    def __init__(
        self,
        sizes: Sizes,
        scalars: Scalars,
        inputs: layout.Operands,
        residuals: Residuals,
        grads: Gradients,
        s: Scratch,
    ):
        blocks = Blocks(inputs.memory_LBMD, s.hidden_XJD, s.semaphore_X)
        super().__init__(sizes, scalars, inputs.weights_DE, blocks, s.distance, s.spread)
        self.inputs, self.residuals, self.grads, self.s = inputs, residuals, grads, s
        self.dtype = inputs.query_BTQ.dtype
        self.packed = sizes.part < BLOCK  # keys and values share a register

    def first(self) -> None:
        """Also clears what all programs add to, and hidden states that are multiplied with zeros."""
        for ref in (self.grads.weights_CHED, self.grads.table_CXKJ, self.s.hidden_XJD):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)
        super().first()  # starts a copy into the hidden states

    # ------------------------------------------------------------------------------------------------- a short head

    def short_head(self) -> None:
        s, blocks = self.s, range(self.sizes.blocks)
        self.start_next_program()
        self._prepare()
        s.step_spread[...] = self.spread[...]
        masks = self.masks(jnp.int32(0), self.inputs.z_BH1T)
        for i in blocks:
            self._position_scores(jnp.int32(0), i)
        for i in blocks:
            content, d_weight = self._products(i, *layout.short_keys(self.inputs, i))
            s.score_I[i] = content + s.position_I[i]
            s.d_weight_I[i] = d_weight
        for i in blocks:
            d_score, weight = self._softmax_gradients(i, masks[i])
            s.d_score_tile_I[i], s.weight_tile_I[i] = d_score.astype(self.dtype), weight.astype(self.dtype)
            s.d_position_I[i] = unskew_flipped(d_score, self.sizes.interpret).astype(self.dtype)
        self._short_keys_and_values()
        for i in blocks:
            self._write_query(i, self._short_query(i))
        self._to_table(0)

    def _short_query(self, i: int) -> jax.Array:
        """The gradient of a query block."""
        s = self.s
        first, second = layout.short_keys(self.inputs, i)
        d_score = s.d_score_tile_I[i]
        content = [dot(d_score[:SHORT], layout.key(first)), dot(d_score[SHORT:], layout.key(second))]
        return jnp.concatenate(content) + flip(dot_t(s.d_position_I[i], self.inputs.table_XKJ[0]))

    def _short_keys_and_values(self) -> None:
        """The first half of a query block reads columns 64 … 127 from the key block before its own."""
        s = self.s
        older = (iota(0) < SHORT) & (iota(1) >= SHORT)
        own: list[jax.Array] = []
        for i in range(self.sizes.blocks):
            pairs = ((s.query_t_I[i], s.d_score_tile_I[i]), (s.d_output_t_I[i], s.weight_tile_I[i]))
            before = [dot(rows_t, _select(older, tile, self.dtype)) for rows_t, tile in pairs]
            if i:
                self.grads.segment_BTE[0, rows(i - 1), :] = self._keys_and_values(
                    own[0] + before[0], own[1] + before[1]
                )
            else:
                self.grads.newest_BJE[0] = self._keys_and_values(*before)
            own = [dot(rows_t, _select(~older, tile, self.dtype)) for rows_t, tile in pairs]
        self.grads.segment_BTE[0, rows(self.sizes.blocks - 1), :] = self._keys_and_values(*own)

    # ------------------------------------------------------------------------------------------------- a long head

    def begin(self) -> None:
        s, blocks = self.s, range(self.sizes.blocks)
        self._prepare()
        self._hold(-1, self.inputs.newest_BJE[0])
        for i in blocks:
            self._hold(i, self.inputs.segment_BTE[0, rows(i), :])
            s.content_I[i], s.d_content_I[i] = self._products(i, s.kv[i], s.kv[i])
            for ref in (s.d_score_I, s.weight_I, s.d_query_t_I, s.d_query_flipped_t_I):
                ref[i] = jnp.zeros(ref.shape[1:], ref.dtype)
        s.d_kv_t[...] = jnp.zeros(s.d_kv_t.shape, jnp.float32)
        for i in blocks:
            self._position_scores(jnp.int32(0), i)
        for i in blocks:
            self._scores(jnp.int32(0), i)
        self.wait(1)
        self._project(1)

    def step(self, step: jax.Array, *, masked: bool) -> None:
        s, blocks = self.s, range(self.sizes.blocks)
        self.advance_copies(step)
        s.step_spread[...] = self.spread_distance(step)
        self._to_weights_if_memory(step)
        s.kv[self.slot(-2 - step)], s.key_t[self.slot(-2 - step)] = s.next_kv[...], s.next_key_t[...]
        self._project(step + 2)
        masks = self.masks(step, self.inputs.z_BH1T) if masked else [None] * len(blocks)
        for i in blocks:
            self._position_scores(step + 1, i)
        for pair in self.sizes.pairs:
            for i in pair:
                self._score_gradients(i, masks[i])
                self._by_distance(i)
            for i in pair:
                self._through_tile(step, i)
                self._through_position(step, i)
            for i in pair:
                self._scores(step + 1, i)
        self._to_table(step)
        self._to_segment_if_complete(step)

    def end(self, step: jax.Array) -> None:
        s, blocks = self.s, range(self.sizes.blocks)
        s.step_spread[...] = self.spread_distance(step)
        masks = self.masks(step, self.inputs.z_BH1T)
        for i in blocks:
            self._score_gradients(i, masks[i])
            self._by_distance(i)
        self._to_weights_if_memory(step)
        for i in blocks:
            self._through_tile(step, i)
            self._through_position(step, i)
        self._to_table(step)
        self._deliver(self.sizes.blocks - 1 - step)
        for i in blocks:
            s.d_score_tile_I[i] = _select(~in_newer_block(), s.d_score_I[i], self.dtype)
            s.weight_tile_I[i] = _select(~in_newer_block(), s.weight_I[i], self.dtype)
        for i in blocks:
            self._through_tile(step + 1, i)
        for i in blocks:
            d_query = jnp.transpose(_to_tile(s.d_query_t_I[i]))
            self._write_query(i, d_query + flip(jnp.transpose(_to_tile(s.d_query_flipped_t_I[i]))))
            self._deliver(i - step - 1)
        self.start_next_program()  # not before: hidden states are read up to here

    # ------------------------------------------------------------------------------------------ scores and gradients

    def _prepare(self) -> None:
        """What both kinds of head need of each query block."""
        s, sizes, log_sum_BHRT = self.s, self.sizes, self.residuals.log_sum_BHRT
        lane = sizes.part % BLOCK
        # With weights and d_dot scaled like this, dropout needs no scale of its own.
        scale = 1 / (1 - sizes.dropout)
        for i in range(sizes.blocks):
            query = self.take(self.inputs.query_BTQ, i, 0)
            d_output = self.take(self.residuals.d_output_BTQ, i, lane)
            d_dot = self.inner_product(self.residuals.d_output_BTQ, self.residuals.output_BTQ, i)
            if log_sum_BHRT.shape[2] > 1:
                d_dot -= column(log_sum_BHRT[0, 0, 1:, rows(i)])
            s.d_dot_I[i] = jnp.broadcast_to(d_dot * (1 / scale), TILE)
            s.log_sum_I[i] = column(log_sum_BHRT[0, 0, :1, rows(i)]) - math.log2(scale)
            for number, half in enumerate(HALVES):
                s.pair_I[i, number] = jnp.concatenate([query[half], d_output[half]]).astype(self.dtype)
            s.query_t_I[i] = jnp.transpose(query.astype(self.dtype))[: sizes.rows]
            s.query_flipped_t_I[i] = jnp.transpose(flip(query).astype(self.dtype))[: sizes.rows]
            s.d_output_t_I[i] = jnp.transpose(d_output.astype(self.dtype))[lane : lane + sizes.rows]
            s.word_I[i] = column(self.query_words(iota(1, (1, BLOCK)) + i * BLOCK))
            s.d_z_I[i] = jnp.zeros(TILE, jnp.float32)

    def _products(self, i: int, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(content scores, gradients of weights) of both halves of a query block, each with 128 keys."""
        content, d_weight = [], []
        for number, kv in enumerate((first, second)):
            pair = self.s.pair_I[i, number]
            if self.packed:  # one product for both: a query is 0 in the lanes of values, a d_output in those of keys
                found = dot_t(pair, kv)
                content.append(found[:SHORT])
                d_weight.append(found[SHORT:])
            else:
                content.append(dot_t(pair[:SHORT], layout.key(kv)))
                d_weight.append(dot_t(pair[SHORT:], layout.value(kv)))
        return jnp.concatenate(content), jnp.concatenate(d_weight)

    def _position_scores(self, step: jax.Array, i: int) -> None:
        table = self.inputs.table_XKJ[jnp.minimum(step, self.sizes.distance_blocks - 1)]
        by_distance = jnp.concatenate([dot(self.s.pair_I[i, number, :SHORT], table) for number in range(2)])
        self.s.position_I[i] = skew(by_distance, self.sizes.interpret)

    def _scores(self, step: jax.Array, i: int) -> None:
        """Scores and gradients of weights of a step: carried ones in the newer key block, new ones in the older."""
        s = self.s
        kv = s.kv[self.slot(i - step - 1)]
        content, d_content = self._products(i, kv, kv)
        s.score_I[i] = jnp.where(in_newer_block(), s.content_I[i], content) + s.position_I[i]
        s.d_weight_I[i] = jnp.where(in_newer_block(), s.d_content_I[i], d_content)
        s.content_I[i], s.d_content_I[i] = content, d_content

    def _softmax_gradients(self, i: int, masks: tuple[jax.Array, jax.Array] | None) -> tuple[jax.Array, jax.Array]:
        """(gradients of scores, weights after dropout) of the current step."""
        s = self.s
        exponent = s.score_I[i] - s.log_sum_I[i]
        if masks is not None:
            exponent = jnp.minimum(exponent, _LARGEST_EXPONENT)
        weight = jnp.exp2(exponent)
        kept = weight
        if self.sizes.dropout:
            kept = jnp.where(self.kept(s.word_I[i], s.step_spread[...]), weight, 0.0)
        d_score = kept * s.d_weight_I[i] - weight * s.d_dot_I[i]
        if masks is None:
            return d_score, kept
        mask, has_derivative = masks
        s.d_z_I[i] += has_derivative * d_score
        return mask * d_score, mask * kept

    def _score_gradients(self, i: int, masks: tuple[jax.Array, jax.Array] | None) -> None:
        """Tiles of one key block each: this step's part of it, and where j ≥ c what the step before left."""
        s = self.s
        d_score, weight = self._softmax_gradients(i, masks)
        newer = in_newer_block()
        s.d_score_tile_I[i] = jnp.where(newer, d_score, s.d_score_I[i]).astype(self.dtype)
        s.weight_tile_I[i] = jnp.where(newer, weight, s.weight_I[i].astype(jnp.float32)).astype(self.dtype)
        s.d_score_I[i], s.weight_I[i] = d_score, weight.astype(self.dtype)

    def _by_distance(self, i: int) -> None:
        self.s.d_position_I[i] = unskew_flipped(self.s.d_score_I[i], self.sizes.interpret).astype(self.dtype)

    # --------------------------------------------------------------------------------- from tiles to queries and keys

    def _through_tile(self, step: jax.Array, i: int) -> None:
        """Adds a tile's part to the gradients of its key block, and of its queries by content."""
        s, height = self.s, self.sizes.rows
        at = self.slot(i - step)
        d_key_t, d_value_t = dot(s.query_t_I[i], s.d_score_tile_I[i]), dot(s.d_output_t_I[i], s.weight_tile_I[i])
        if i == 0:  # always the first to read its block
            s.d_kv_t[at, :height], s.d_kv_t[at, height:] = d_key_t, d_value_t
        else:
            s.d_kv_t[at, :height] += d_key_t
            s.d_kv_t[at, height:] += d_value_t
        s.d_query_t_I[i] += dot_t(s.key_t[at], s.d_score_tile_I[i])

    def _through_position(self, step: jax.Array, i: int) -> None:
        s = self.s
        s.d_query_flipped_t_I[i] += dot_t(self.inputs.table_XKJ[step][: self.sizes.rows], s.d_position_I[i])

    def _to_table(self, step: jax.Array | int) -> None:
        s = self.s
        parts = [dot(s.query_flipped_t_I[i], s.d_position_I[i]) for i in range(self.sizes.blocks)]
        self.grads.table_CXKJ[0, step] += sum(parts[1:], parts[0])

    def _to_weights_if_memory(self, step: jax.Array) -> None:
        """The key block that the step before completed; if it is not of memory, zeros: cheaper than a branch."""
        block = self.sizes.blocks - step
        self._to_weights(block, jnp.where(block < -1, self.s.d_kv_t[self.slot(block)], 0.0))

    def _to_segment_if_complete(self, step: jax.Array) -> None:
        """The key block that this step has completed, if its gradient is to be written."""
        block = self.sizes.blocks - 1 - step

        @pl.when(block >= -1)
        def _() -> None:
            self._deliver_segment(block)

    def _deliver(self, block: jax.Array) -> None:
        """The gradient of a complete key block, to where it belongs."""

        @pl.when(block >= -1)
        def _() -> None:
            self._deliver_segment(block)

        @pl.when(block < -1)
        def _() -> None:
            self._to_weights(block, self.s.d_kv_t[self.slot(block)])

    def _to_weights(self, block: jax.Array, d_kv_t: jax.Array) -> None:
        self.grads.weights_CHED[0, self.head] += dot(d_kv_t.astype(self.dtype), self.hidden(-1 - block))

    def _deliver_segment(self, block: jax.Array) -> None:
        d_kv_t, height = self.s.d_kv_t[self.slot(block)], self.sizes.rows
        d_kv = self._keys_and_values(d_kv_t[:height], d_kv_t[height:])

        @pl.when(block >= 0)
        def _() -> None:
            self.grads.segment_BTE[0, pl.ds(pl.multiple_of(block * BLOCK, BLOCK), BLOCK), :] = d_kv

        @pl.when(block < 0)
        def _() -> None:
            self.grads.newest_BJE[0] = d_kv

    def _keys_and_values(self, d_key_t: jax.Array, d_value_t: jax.Array) -> jax.Array:
        """The gradient of a key block as it is written: [128, E]."""
        parts = [d_key_t * (1 / math.sqrt(self.sizes.head_width)), d_value_t]
        parts = [_pad_rows(part.astype(self.dtype), self.sizes.part) for part in parts]
        if self.packed:
            return jnp.transpose(jnp.concatenate(parts))
        return jnp.concatenate([jnp.transpose(part) for part in parts], axis=1)

    def _write_query(self, i: int, d_query: jax.Array) -> None:
        """Also the gradient of z. Keys and table are scaled to scores in base 2, gradients are not."""
        self.put(self.grads.query_BTQ, i, 0, d_query * math.log(2))
        # Where all tokens share z, only the sum of the row matters, not which query it comes from.
        d_z = jnp.transpose(self.s.d_z_I[i]) if self.sizes.per_query else self.s.d_z_I[i]
        d_z = jnp.sum(d_z, axis=0, keepdims=True)
        self.grads.z_BH1T[0, 0, :, rows(i)] = d_z * (1 / self.sizes.ramp)

    # --------------------------------------------------------------------------------------------------------- keys

    def _project(self, step: jax.Array | int) -> None:
        kv = self.project(step)
        self.s.next_kv[...], self.s.next_key_t[...] = kv, self._key_t(kv)

    def _hold(self, block: int, kv: jax.Array) -> None:
        self.s.kv[self.slot(block)] = kv
        self.s.key_t[self.slot(block)] = self._key_t(kv)

    def _key_t(self, kv: jax.Array) -> jax.Array:
        return jnp.transpose(layout.key(kv))[: self.sizes.rows]


def _select(where: jax.Array, tile: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The tile where a condition holds, else 0."""
    return jnp.where(where, tile.astype(jnp.float32), 0.0).astype(dtype)


def _to_tile(transposed: jax.Array) -> jax.Array:
    return _pad_rows(transposed, BLOCK)


def _pad_rows(array: jax.Array, count: int) -> jax.Array:
    missing = count - array.shape[0]
    return jnp.concatenate([array, jnp.zeros((missing, array.shape[1]), array.dtype)]) if missing else array
