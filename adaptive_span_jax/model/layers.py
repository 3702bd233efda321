"""Sublayers: adaptive-span attention and a feed-forward network, each with a residual connection and LayerNorm.

An all-attention layer has persistent vectors in its attention instead of the feed-forward network.

`SpanAttention` does not depend on the rest and can be used in any Flax model; README shows how.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from adaptive_span_jax.model.attention import paths, persistent, reference
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.linear import linear, row_major
from adaptive_span_jax.model.memory import LayerMemory, shift_in
from adaptive_span_jax.model.span import Span

Extra = TypeVar("Extra")

# Places of dropout, so that each gets different bits in sublayers of the same index.
_IN_ATTENTION, _IN_FEEDFORWARD, _IN_PERSISTENT = 0, 1, 2


def uniform(key: jax.Array, shape: tuple[int, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param:
    """A parameter drawn from U(±1/√fan_in), as every linear weight and bias."""
    bound = fan_in**-0.5
    return nnx.Param(jax.random.uniform(key, shape, dtype, -bound, bound))


class PersistentVectors(nnx.Module):
    """Learned keys and values of each head, which every query can attend to; see attention/persistent.py."""

    def __init__(self, heads: int, head_width: int, count: int, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        key_HKU = jax.random.normal(rngs.params(), (heads, head_width, count), dtype)
        value_HUK = jax.random.normal(rngs.params(), (heads, count, head_width), dtype)
        self.key_HKU = nnx.Param(key_HKU * head_width**-0.5)
        self.value_HUK = nnx.Param(value_HUK * count**-0.5)

    def attend(self, query_BTHK: jax.Array, dropout: Dropout | None = None) -> tuple[jax.Array, jax.Array]:
        """(output_BTHK, log_sum_BTH) over these vectors alone."""
        return persistent.attend(query_BTHK, *self.vectors(query_BTHK.dtype), dropout)

    def vectors(self, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
        """(key_HKU, value_HUK) in a dtype."""
        return self.key_HKU[...].astype(dtype), self.value_HUK[...].astype(dtype)


class SpanAttention(nnx.Module):
    """Multi-head attention in which every head has its own span; memory goes in and comes out.

    `persistent`: how many learned key/value pairs each head attends to besides its context.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        span: Span,
        *,
        ramp: int = 32,
        path: str = "auto",
        persistent: int = 0,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ):
        shape = (width, heads, width // heads)
        self.query_DHK = uniform(rngs.params(), shape, width, dtype)
        self.key_DHK = uniform(rngs.params(), shape, width, dtype)
        self.value_DHK = uniform(rngs.params(), shape, width, dtype)
        self.output_HKD = uniform(rngs.params(), (*shape[1:], width), width, dtype)
        self.span = span
        self.ramp = ramp
        self.path = path  # one of config.ATTENTION_PATHS
        self.persistent = (
            PersistentVectors(heads, width // heads, persistent, rngs=rngs, dtype=dtype) if persistent else None
        )

    def __call__(
        self,
        hidden_BTD: jax.Array,
        memory_BSD: jax.Array,
        positions_SK: jax.Array,
        *,
        valid_length: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(output_BTD, the memory for the next segment, z_BTH in positions)."""
        output_BTD, z_BTH = self.attend(
            hidden_BTD, LayerMemory.of(memory_BSD), positions_SK, valid_length=valid_length, dropout=dropout
        )
        return output_BTD, shift_in(memory_BSD, hidden_BTD), z_BTH

    def attend(
        self,
        hidden_BTD: jax.Array,
        memory: LayerMemory,
        positions_SK: jax.Array,
        *,
        valid_length: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(output_BTD, z_BTH in positions), for a memory that the caller advances."""
        dtype = hidden_BTD.dtype
        z_BTH = self.span(hidden_BTD)
        width, heads, _ = self.key_DHK.shape
        vectors = self.persistent.key_HKU.shape[-1] if self.persistent else 0
        path = paths.path_of(self.path, hidden_BTD.shape[1], width, heads, memory.limit, memory.ring, dtype, vectors)
        query_BTHK = self._query(hidden_BTD)
        in_context = path.attend(
            query_BTHK,
            hidden_BTD,
            memory,
            self.key_DHK[...].astype(dtype),
            self.value_DHK[...].astype(dtype),
            positions_SK,
            z_BTH,
            ramp=self.ramp,
            valid_length=valid_length,
            dropout=dropout.at(_IN_ATTENTION) if dropout else None,
        )
        output_BTHK = self.with_persistent(query_BTHK, in_context, dropout, path.join)
        return linear(output_BTHK, self.output_HKD[...].astype(dtype), 2), z_BTH

    def with_persistent(
        self,
        query_BTHK: jax.Array,
        in_context: tuple[jax.Array, jax.Array],
        dropout: Dropout | None = None,
        join: Callable[..., jax.Array] = persistent.join,
    ) -> jax.Array:
        """output_BTHK over context and persistent vectors, given (output_BTHK, log_sum_BTH) over the context."""
        if self.persistent is None:
            return in_context[0]
        dropout = dropout.at(_IN_PERSISTENT) if dropout else None
        return join(in_context, query_BTHK, *self.persistent.vectors(query_BTHK.dtype), dropout)

    def weights(
        self,
        hidden_BTD: jax.Array,
        memory_BSD: jax.Array,
        positions_SK: jax.Array,
        valid_length: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(the attention of each token to the S positions before it, furthest first: weight_BHTS; z_BTH).

        A token's weights sum to 1 or, with persistent vectors, to 1 less its attention to those.
        """
        dtype = hidden_BTD.dtype
        z_BTH = self.span(hidden_BTD)
        query_BTHK = self._query(hidden_BTD)
        weight_BHTS, log_sum_BHT = reference.weights(
            query_BTHK,
            jnp.concatenate([memory_BSD, hidden_BTD], axis=1),
            self.key_DHK[...].astype(dtype),
            positions_SK.astype(dtype),
            z_BTH,
            ramp=self.ramp,
            valid_length=valid_length,
        )
        if self.persistent is not None:
            _, log_sum_BTH = self.persistent.attend(query_BTHK)
            weight_BHTS *= jax.nn.sigmoid(log_sum_BHT - jnp.moveaxis(log_sum_BTH, 2, 1))[..., None]
        return weight_BHTS, z_BTH

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        """The mean span in positions; add λ times this to the loss."""
        return self.span.penalty(z_BTH)

    def _query(self, hidden_BTD: jax.Array) -> jax.Array:
        return linear(hidden_BTD, self.query_DHK[...].astype(hidden_BTD.dtype))


@jax.custom_vjp
def _relu_and_drop(x: jax.Array, dropout: Dropout) -> jax.Array:
    """ReLU, then dropout. Its result is the only residual: a gradient passes where it is positive."""
    return jax.nn.relu(x) * dropout.scale().astype(x.dtype)


def _relu_and_drop_forward(x: jax.Array, dropout: Dropout) -> tuple[jax.Array, tuple[jax.Array, Dropout]]:
    y = _relu_and_drop(x, dropout)
    return y, (y, Dropout(dropout.rate, jnp.zeros((), jnp.uint32)))


def _relu_and_drop_backward(residuals: tuple[jax.Array, Dropout], d_y: jax.Array) -> tuple[jax.Array, None]:
    y, dropout = residuals
    return jnp.where(y > 0, d_y * jnp.asarray(1 / (1 - dropout.rate), y.dtype), 0), None


_relu_and_drop.defvjp(_relu_and_drop_forward, _relu_and_drop_backward)


class FeedForward(nnx.Module):
    """Two linear maps with a ReLU and dropout between them."""

    def __init__(self, width: int, inner: int, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.expand_DF = uniform(rngs.params(), (width, inner), width, dtype)
        self.expand_bias_F = uniform(rngs.params(), (inner,), width, dtype)
        self.contract_FD = uniform(rngs.params(), (inner, width), inner, dtype)
        self.contract_bias_D = uniform(rngs.params(), (width,), inner, dtype)

    def __call__(self, hidden_BTD: jax.Array, dropout: Dropout | None = None) -> jax.Array:
        dtype = hidden_BTD.dtype
        inner_BTF = linear(hidden_BTD, self.expand_DF[...].astype(dtype))
        inner_BTF += self.expand_bias_F[...].astype(dtype)[None, None, :]
        if dropout is None:
            inner_BTF = jax.nn.relu(inner_BTF)
        else:
            _, position_1T1, unit_11F = jnp.ogrid[tuple(slice(size) for size in inner_BTF.shape)]
            stream_B11 = dropout.streams(inner_BTF.shape[0])[:, None, None]
            inner_BTF = _relu_and_drop(inner_BTF, dropout.at(stream_B11).at(position_1T1).at(unit_11F))
        output_BTD = linear(inner_BTF, self.contract_FD[...].astype(dtype))
        return output_BTD + self.contract_bias_D[...].astype(dtype)[None, None, :]


class LayerNorm(nnx.Module):
    """(x − mean) / deviation · scale + bias over the last axis, with x as the only residual of its size.

    `nnx.LayerNorm` has three. The gradients are written by hand: they take two passes over x.
    """

    def __init__(self, width: int, dtype: DTypeLike = jnp.float32):
        self.scale = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return _normalise(x_BTD, self.scale[...], self.bias[...])


@jax.custom_vjp
def _normalise(x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    return _normalise_forward(x_BTD, scale_D, bias_D)[0]


# Both passes compute in the parameters' dtype, float32 or better, also for bfloat16 inputs.
def _normalise_forward(
    x_BTD: jax.Array, scale_D: jax.Array, bias_D: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x_BTD = row_major(x_BTD)
    wide_BTD = x_BTD.astype(scale_D.dtype)
    # The variance takes two passes: in one pass it loses digits where the mean is large.
    mean_BT1 = wide_BTD.mean(axis=-1, keepdims=True)
    centred_BTD = wide_BTD - mean_BT1
    variance_BT1 = (centred_BTD * centred_BTD).mean(axis=-1, keepdims=True)
    factor_BT1 = jax.lax.rsqrt(variance_BT1 + 1e-5)
    normal_BTD = centred_BTD * factor_BT1
    y_BTD = (normal_BTD * scale_D[None, None, :] + bias_D[None, None, :]).astype(x_BTD.dtype)
    return y_BTD, (x_BTD, mean_BT1, factor_BT1, scale_D)


def _normalise_backward(residuals: tuple[jax.Array, ...], d_y_BTD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_BTD, mean_BT1, factor_BT1, scale_D = residuals
    normal_BTD = (x_BTD.astype(scale_D.dtype) - mean_BT1) * factor_BT1
    d_y_BTD = d_y_BTD.astype(scale_D.dtype)
    d_normal_BTD = d_y_BTD * scale_D[None, None, :]
    mean_d_BT1 = d_normal_BTD.mean(axis=-1, keepdims=True)
    mean_product_BT1 = (d_normal_BTD * normal_BTD).mean(axis=-1, keepdims=True)
    d_x_BTD = (d_normal_BTD - mean_d_BT1 - normal_BTD * mean_product_BT1) * factor_BT1
    return d_x_BTD.astype(x_BTD.dtype), (d_y_BTD * normal_BTD).sum(axis=(0, 1)), d_y_BTD.sum(axis=(0, 1))


_normalise.defvjp(_normalise_forward, _normalise_backward)


class AttentionSublayer(nnx.Module):
    """Post-norm: h = LN(h + attention(h))."""

    def __init__(self, attention: SpanAttention):
        width, _, _ = attention.query_DHK.shape
        self.attention = attention
        self.attention_norm = LayerNorm(width, attention.query_DHK.dtype)

    def __call__(
        self,
        hidden_BTD: jax.Array,
        memory: LayerMemory,
        positions_SK: jax.Array,
        *,
        valid_length: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(the next sublayer's input, z_BTH); `dropout` is that of the sublayer's index."""

        def attend(hidden_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.attention.attend(hidden_BTD, memory, positions_SK, valid_length=valid_length, dropout=dropout)

        return self.around(attend, hidden_BTD)

    def around(
        self, attend: Callable[[jax.Array], tuple[jax.Array, Extra]], hidden_BTD: jax.Array
    ) -> tuple[jax.Array, Extra]:
        """(the next sublayer's input, what `attend` returns besides its output): the sublayer around any attention."""
        attended_BTD, extra = attend(hidden_BTD)
        return self.attention_norm(hidden_BTD + attended_BTD), extra


class FeedForwardSublayer(nnx.Module):
    """Post-norm: h = LN(h + feed-forward(h))."""

    def __init__(self, feedforward: FeedForward):
        width, _ = feedforward.expand_DF.shape
        self.feedforward = feedforward
        self.feedforward_norm = LayerNorm(width, feedforward.expand_DF.dtype)

    def __call__(self, hidden_BTD: jax.Array, dropout: Dropout | None = None) -> jax.Array:
        """The next sublayer's input; `dropout` is that of the sublayer's index."""
        fed_BTD = self.feedforward(hidden_BTD, dropout.at(_IN_FEEDFORWARD) if dropout else None)
        return self.feedforward_norm(hidden_BTD + fed_BTD)
