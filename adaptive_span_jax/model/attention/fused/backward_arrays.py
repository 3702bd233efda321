"""What the backward kernel reads, writes and keeps in VMEM."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from adaptive_span_jax.model.attention.fused.program import Ref
from adaptive_span_jax.model.attention.fused.sizes import BLOCK, Sizes
from adaptive_span_jax.model.attention.fused.tiles import TILE


class Residuals(NamedTuple):
    """What the backward kernel reads besides the forward kernel's operands."""

    output_BTQ: Any
    log_sum_BHRT: Any  # row 0: in base 2; row 1, if there is one: its gradient, of the natural logarithm
    d_output_BTQ: Any


class Gradients(NamedTuple):
    """What it writes. The table and the keys' part of the weights are still to be scaled by 1/√K."""

    query_BTQ: Any
    segment_BTE: Any
    newest_BJE: Any
    weights_CHED: Any  # of all memory blocks but the newest, for each core: float32, [C, H, 2 · rows, D]
    table_CXKJ: Any  # for each core: float32
    z_BH1T: Any  # float32


class Scratch(NamedTuple):
    """VMEM of a program, as in forward.py. _t: transposed, [rows, 128]."""

    hidden_XJD: Ref
    semaphore_X: Ref
    distance: Ref
    spread: Ref
    step_spread: Ref
    pair_I: Ref  # [I, 2, 128, 128]: 64 queries and their 64 d_outputs, these in the lanes of values; both halves
    query_t_I: Ref
    query_flipped_t_I: Ref  # its columns in the order of `tiles.flip`
    d_output_t_I: Ref
    word_I: Ref
    log_sum_I: Ref
    d_dot_I: Ref  # Σ d_output·output, less the gradient of the log-sum-exp
    kv: Ref
    key_t: Ref  # like kv
    next_kv: Ref  # the block that the next step adds: written to kv there, because a dynamic store orders later loads
    next_key_t: Ref
    position_I: Ref
    content_I: Ref
    d_content_I: Ref  # the same for d_output · values, the gradient of weights
    score_I: Ref
    d_weight_I: Ref
    d_score_I: Ref  # of the current step; those with j ≥ c are still to be used by the next
    weight_I: Ref  # the same for weights after dropout
    d_score_tile_I: Ref  # whole tiles of one key block, in the compute dtype
    weight_tile_I: Ref
    d_position_I: Ref  # score gradients by distance, rows flipped
    d_query_t_I: Ref
    d_query_flipped_t_I: Ref  # the part of the position scores
    d_kv_t: Ref  # like kv
    d_z_I: Ref

    @staticmethod
    def shapes(sizes: Sizes, dtype: jnp.dtype, memory_dtype: jnp.dtype) -> "Scratch":
        def tile(dtype: Any = jnp.float32) -> Ref:
            return pltpu.VMEM((sizes.blocks, *TILE), dtype)

        def transposed(count: int, rows: int, dtype: Any) -> Ref:
            return pltpu.VMEM((count, rows, BLOCK), dtype)

        blocks, height, lanes = sizes.blocks, sizes.rows, 2 * sizes.part
        return Scratch(
            hidden_XJD=pltpu.VMEM((sizes.hidden_blocks, BLOCK, sizes.width), memory_dtype),
            semaphore_X=pltpu.SemaphoreType.DMA((sizes.hidden_blocks,)),
            distance=pltpu.VMEM(TILE, jnp.float32),
            spread=pltpu.VMEM(TILE, jnp.uint32),
            step_spread=pltpu.VMEM(TILE, jnp.uint32),
            pair_I=pltpu.VMEM((blocks, 2, *TILE), dtype),
            query_t_I=transposed(blocks, height, dtype),
            query_flipped_t_I=transposed(blocks, height, dtype),
            d_output_t_I=transposed(blocks, height, dtype),
            word_I=tile(jnp.uint32),
            log_sum_I=tile(),
            d_dot_I=tile(),
            kv=pltpu.VMEM((sizes.slots, BLOCK, lanes), dtype),
            key_t=transposed(sizes.slots, height, dtype),
            next_kv=pltpu.VMEM((BLOCK, lanes), dtype),
            next_key_t=pltpu.VMEM((height, BLOCK), dtype),
            position_I=tile(),
            content_I=tile(),
            d_content_I=tile(),
            score_I=tile(),
            d_weight_I=tile(),
            d_score_I=tile(),
            weight_I=tile(dtype),
            d_score_tile_I=tile(dtype),
            weight_tile_I=tile(dtype),
            d_position_I=tile(dtype),
            d_query_t_I=transposed(blocks, height, jnp.float32),
            d_query_flipped_t_I=transposed(blocks, height, jnp.float32),
            d_kv_t=transposed(sizes.slots, 2 * height, jnp.float32),
            d_z_I=tile(),
        )


def vmem_bytes(sizes: Sizes, dtype: Any, memory_dtype: Any) -> int:
    """What a call takes of a core's VMEM: more than the forward kernel, which keeps less."""
    compute, full = jnp.dtype(dtype).itemsize, jnp.dtype(jnp.float32).itemsize
    queries, lanes = sizes.heads * sizes.head_width, 2 * sizes.part
    buffered = 4 * sizes.segment * queries + 2 * (sizes.segment + BLOCK) * lanes  # read and written by the pipeline
    table, weights = sizes.distance_blocks * BLOCK, sizes.heads * sizes.width
    scratch = [ref for ref in Scratch.shapes(sizes, dtype, memory_dtype) if ref.memory_space == pltpu.VMEM]
    return (
        2 * compute * buffered
        + compute * (table * BLOCK + weights * lanes)
        + full * (table * sizes.rows + weights * 2 * sizes.rows)
        + sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in scratch)
    )
