"""Plain attention over a memory: short, obvious, and the oracle that anything faster is held against.

Every query sees the S positions before it, wherever the segment starts. The context is the memory followed by the
segment, so query t stands at index S + t and sees the indices t … S + t − 1. Scores against the whole context are
therefore a band, one step further right in every row, and `_band` cuts it out as a rectangle whose column c is the
distance S − c:

    t=0  [a b c d] . . .                a b c d        column 0 is the furthest position, S back,
    t=1   . [e f g h] . .       →       e f g h        the last column is the previous token
    t=2   . . [i j k l] .               i j k l
"""

import math

import jax
import jax.numpy as jnp

from adaptive_span_jax.dropout import Dropout
from adaptive_span_jax.memory import LayerMemory
from adaptive_span_jax.span import soft_mask


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
    """Each head's weighted average of the values it sees: output_BTHK.

    `z_BTH` may have size 1 in B and T. `filled` is the number of memory positions that hold real states; when it is
    given, the empty ones are not attended to. Memory takes no gradient; the projections of it do, as published.
    """
    streams, length, heads, _ = query_BTHK.shape
    memory_BSD = jax.lax.stop_gradient(memory.whole()).astype(segment_BTD.dtype)
    context_BJD = jnp.concatenate([memory_BSD, segment_BTD], axis=1)
    value_BJHK = jnp.einsum("BJD,DHK->BJHK", context_BJD, value_DHK)
    weight_BHTS = weights(query_BTHK, context_BJD, key_DHK, positions_SK, z_BTH, ramp=ramp, filled=filled)
    if dropout is not None:
        _, head_1H11, query_11T1 = jnp.ogrid[:1, :heads, :length, :1][:3]
        stream_B111 = dropout.streams(streams)[:, None, None, None]
        distance_S = jnp.arange(positions_SK.shape[0], 0, -1)
        dropped = dropout.at(stream_B111).at(head_1H11).at(query_11T1).at(distance_S[None, None, None, :])
        weight_BHTS *= dropped.scale()
    weight_BHTJ = _unband(weight_BHTS).astype(value_BJHK.dtype)
    return jnp.einsum("BHTJ,BJHK->BTHK", weight_BHTJ, value_BJHK)


def weights(
    query_BTHK: jax.Array,
    context_BJD: jax.Array,
    key_DHK: jax.Array,
    positions_SK: jax.Array,
    z_BTH: jax.Array,
    *,
    ramp: int,
    filled: jax.Array | None = None,
) -> jax.Array:
    """How much each query attends to each of the S positions before it, the furthest first: weight_BHTS."""
    limit, head_width = positions_SK.shape
    length = query_BTHK.shape[1]
    key_BJHK = jnp.einsum("BJD,DHK->BJHK", context_BJD, key_DHK)

    # Sums over many positions are kept in float32 whatever the products are computed in.
    exact = jnp.promote_types(query_BTHK.dtype, jnp.float32)
    content_BHTJ = jnp.einsum("BTHK,BJHK->BHTJ", query_BTHK, key_BJHK, preferred_element_type=exact)
    position_BHTS = jnp.einsum("BTHK,SK->BHTS", query_BTHK, positions_SK[::-1], preferred_element_type=exact)
    # The paper's Eq. 1 has no scale; the published code scales content and position alike.
    score_BHTS = (_band(content_BHTJ, limit) + position_BHTS) / math.sqrt(head_width)

    distance_S = jnp.arange(limit, 0, -1)
    z_BHT1 = jnp.moveaxis(z_BTH, 2, 1)[..., None].astype(exact)
    mask_BHTS = soft_mask(distance_S[None, None, None, :].astype(exact), z_BHT1, ramp)
    if filled is not None:
        real_TS = distance_S[None, :] <= filled + jnp.arange(length)[:, None]
        mask_BHTS = jnp.where(real_TS[None, None], mask_BHTS, 0)
    return masked_softmax(score_BHTS, mask_BHTS)


def masked_softmax(score: jax.Array, mask: jax.Array) -> jax.Array:
    """m·exp(s) / Σ m·exp(s) over the last axis; all zeros where the mask is.

    The published code adds 1e-8 to the sum. That leaks a gradient of about 1e-8 into scores beyond the span, which
    Adagrad then scales up to full steps, and it cannot be had without computing masked-out scores: it is left out
    here.
    """
    score, mask = jnp.broadcast_arrays(score, mask)
    # The largest score is taken inside the span, so that a huge one outside cannot make the whole sum vanish …
    top = jnp.max(score, axis=-1, keepdims=True, where=mask > 0, initial=-jnp.inf)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    # … and scores outside are capped, so that the mask's derivative at its closed end (m = 0 there) stays finite.
    cap = math.log(float(jnp.finfo(score.dtype).max)) / 2
    weight = mask * jnp.exp(jnp.minimum(score - top, cap))
    total = weight.sum(axis=-1, keepdims=True)
    return weight / jnp.where(total > 0, total, 1)


def _band(rows: jax.Array, limit: int) -> jax.Array:
    """[…, T, S + T] → […, T, S]: row t keeps columns t … t + S − 1, by reshaping rather than gathering."""
    *outer, length, context = rows.shape
    flat = jnp.pad(rows.reshape(*outer, length * context), [(0, 0)] * len(outer) + [(0, length)])
    return flat.reshape(*outer, length, context + 1)[..., :limit]


def _unband(band: jax.Array) -> jax.Array:
    """[…, T, S] → […, T, S + T]: the inverse of `_band`, with zeros outside the band."""
    *outer, length, limit = band.shape
    context = limit + length
    wide = jnp.pad(band, [(0, 0)] * (len(outer) + 1) + [(0, length + 1)])
    return wide.reshape(*outer, length * (context + 1))[..., : length * context].reshape(*outer, length, context)
