"""Plain attention over a memory: short, obvious, and the oracle that every faster path is tested against.

Every query sees the S positions before it, wherever the segment starts. The context is the memory followed by the
segment, so query t stands at index S + t and sees the indices t … S + t − 1. The scores it needs are therefore a band
of those against the whole context. `band_by_distance` (skew.py) turns the band into a rectangle whose column c is the
distance S − c: column 0 is the furthest position, the last column is the previous token.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from adaptive_span_jax.model.attention.skew import band_by_distance, band_by_key
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.memory import LayerMemory
from adaptive_span_jax.model.span import soft_mask


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
    """(each head's weighted average of the values it sees: output_BTHK, log Σ m·exp(s) over them: log_sum_BTH).

    The log-sum is in float32 at least. For a query that sees nothing, the average is 0 and the log-sum finite and very
    low. `z_BTH` may have size 1 in B and T. `valid_length` is how many positions before the segment hold real states;
    if it is given, positions before those are not attended to. Memory has no gradient, but its projections do, as
    published.
    """
    streams, length, heads, _ = query_BTHK.shape
    memory_BSD = jax.lax.stop_gradient(memory.to_array()).astype(segment_BTD.dtype)
    context_BJD = jnp.concatenate([memory_BSD, segment_BTD], axis=1)
    value_BJHK = jnp.einsum("BJD,DHK->BJHK", context_BJD, value_DHK)
    weight_BHTS, log_sum_BHT = weights(
        query_BTHK, context_BJD, key_DHK, positions_SK, z_BTH, ramp=ramp, valid_length=valid_length
    )
    if dropout is not None:
        _, head_1H11, query_11T1 = jnp.ogrid[:1, :heads, :length, :1][:3]
        stream_B111 = dropout.streams(streams)[:, None, None, None]
        distance_S = jnp.arange(positions_SK.shape[0], 0, -1)
        dropout = dropout.at(stream_B111).at(head_1H11).at(query_11T1).at(distance_S[None, None, None, :])
        weight_BHTS *= dropout.scale()
    weight_BHTJ = band_by_key(weight_BHTS).astype(value_BJHK.dtype)
    return jnp.einsum("BHTJ,BJHK->BTHK", weight_BHTJ, value_BJHK), jnp.moveaxis(log_sum_BHT, 1, 2)


def weights(
    query_BTHK: jax.Array,
    context_BJD: jax.Array,
    key_DHK: jax.Array,
    positions_SK: jax.Array,
    z_BTH: jax.Array,
    *,
    ramp: int,
    valid_length: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(how much each query attends to each of the S positions before it, furthest first: weight_BHTS, log_sum_BHT)."""
    limit, head_width = positions_SK.shape
    length = query_BTHK.shape[1]
    key_BJHK = jnp.einsum("BJD,DHK->BJHK", context_BJD, key_DHK)

    # Sums over many positions are accumulated in float32 at least, whatever the compute dtype.
    accum_dtype = jnp.promote_types(query_BTHK.dtype, jnp.float32)
    content_BHTJ = jnp.einsum("BTHK,BJHK->BHTJ", query_BTHK, key_BJHK, preferred_element_type=accum_dtype)
    furthest_first_SK = positions_SK[::-1].astype(query_BTHK.dtype)
    position_BHTS = jnp.einsum("BTHK,SK->BHTS", query_BTHK, furthest_first_SK, preferred_element_type=accum_dtype)
    # The paper's Eq. 1 has no scale; the published code scales content and position alike.
    score_BHTS = (band_by_distance(content_BHTJ) + position_BHTS) / math.sqrt(head_width)

    distance_S = jnp.arange(limit, 0, -1)
    z_BHT1 = jnp.moveaxis(z_BTH, 2, 1)[..., None].astype(accum_dtype)
    mask_BHTS = soft_mask(distance_S[None, None, None, :].astype(accum_dtype), z_BHT1, ramp)
    if valid_length is not None:
        real_TS = distance_S[None, :] <= valid_length + jnp.arange(length)[:, None]
        mask_BHTS = jnp.where(real_TS[None, None], mask_BHTS, 0)
    return masked_softmax(score_BHTS, mask_BHTS)


def masked_softmax(score: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(m·exp(s) / Σ m·exp(s), log Σ m·exp(s)) over the last axis.

    For a row whose mask is all zeros, the weights are zeros and the log-sum is finite and very low.

    The published code adds 1e-8 to the sum. That leaks a gradient of about 1e-8 into scores beyond the span, which
    Adagrad then scales up to full steps. It would also require computing masked-out scores, so it is left out here.
    """
    score, mask = jnp.broadcast_arrays(score, mask)
    # The maximum is taken inside the span, so that a huge score outside cannot underflow the whole sum …
    top = jnp.max(score, axis=-1, keepdims=True, where=mask > 0, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    # … and scores outside are capped, so that the derivative of the mask where the ramp ends (m = 0) stays finite.
    cap = math.log(float(jnp.finfo(score.dtype).max)) / 2
    weight = mask * jnp.exp(jnp.minimum(score - top, cap))
    total = weight.sum(axis=-1, keepdims=True)
    divisor = jnp.where(total > 0, total, 1)
    log_sum = jnp.where(total > 0, top + jnp.log(divisor), lowest(score.dtype))
    return weight / divisor, log_sum[..., 0]


def lowest(dtype: DTypeLike) -> float:
    """The log-sum over nothing: far below any score, but finite, so that differences of two are not NaN."""
    return float(jnp.finfo(dtype).min / 4)
