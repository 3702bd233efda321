"""How far each head looks back: the soft mask, and the three kinds of span that set it.

A span module is called with the layer's input and answers z, in positions, of a shape that broadcasts to [B, T, H]; its
`penalty(z)` is what the loss multiplies by lambda. Nothing else asks which kind it is:

    kind      z                                  learned            penalised
    fixed     S                                  nothing            no
    adaptive  S · z', one z' in [0, 1] per head  span_fraction_H    mean over heads
    dynamic   S · σ(vᵀx_t + b) per head, token   weight_DH, bias_H  mean over heads and tokens
"""

from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from adaptive_span_jax.config import SpanConfig

Tree = TypeVar("Tree")

# The paper's b: dynamic spans start at S·σ(−4), a fiftieth of the limit.
DYNAMIC_INITIAL_BIAS = -4.0


@jax.custom_jvp
def _clip_to_unit(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0, 1)


@_clip_to_unit.defjvp
def _clip_to_unit_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # The derivative is 1 on the closed interval. At both ends jnp.clip answers 0.5 and lax.clamp 0; published spans
    # were trained with 1, and most heads sit exactly at z = 0, where distances 1 and R + 1 are such ends, for most of
    # training.
    (x,), (x_dot,) = primals, tangents
    return _clip_to_unit(x), jnp.where((x >= 0) & (x <= 1), x_dot, 0)


def soft_mask(distance: jax.Array, z: jax.Array, ramp: int) -> jax.Array:
    """m_z(x): 1 up to distance z + 1, then a ramp of length R down to 0.

    The paper has R + z − x; the published code, which we follow, has one more, so that z = 0 leaves exactly R non-zero
    positions.
    """
    return _clip_to_unit((ramp + z + 1 - distance) / ramp)


def reach(z: jax.Array, ramp: int, limit: int) -> jax.Array:
    """How many positions back a head with span z reads: the mask is 0 beyond, and its derivative too."""
    return jnp.minimum(jnp.floor(z + ramp + 1), limit).astype(jnp.int32)


# Spans as people see them. A head's span is min(z + R, S): positions, ramp included, not rounded. A model's
# shortest and longest span are the smallest and the largest of these. Stored unrounded, shown with one decimal.
# Where a head's z differs between tokens (dynamic spans), z is first averaged over tokens: over all scored tokens of
# dev in results and reports, over the tokens of the step in what training logs.
# Only the average span rounds on the way, because the paper's tables do; see `average_span`.


def head_spans(z: np.ndarray, ramp: int, limit: int) -> np.ndarray:
    """Each head's span in positions: min(z + R, S); NaN where z is not finite."""
    z = np.asarray(z)
    return np.where(np.isfinite(z), np.minimum(z + ramp, limit), np.nan)


def average_span(z_LH: np.ndarray, ramp: int, limit: int) -> float:
    """The average span as published logs report it: the mean over layers of ⌈mean z⌉ + R, at most S."""
    return np.minimum(np.ceil(z_LH.mean(axis=1)) + ramp, limit).mean()


def mean_z(z_LBTH: jax.Array, counted_BT: ArrayLike) -> jax.Array:
    """Each head's z, averaged over the tokens that count: z_LH."""
    if z_LBTH.shape[1:3] == (1, 1):
        return z_LBTH[:, 0, 0]
    counted_BT = jnp.asarray(counted_BT, z_LBTH.dtype)
    return jnp.einsum("LBTH,BT->LH", z_LBTH, counted_BT) / jnp.maximum(counted_BT.sum(), 1)


class Span(Protocol):
    """What the model knows of a span."""

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        """z in positions, broadcastable to [B, T, H]."""
        ...

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        """What the loss multiplies by lambda, in positions."""
        ...


class FixedSpan(nnx.Module):
    """Every head reads the whole limit."""

    def __init__(self, heads: int, limit: int, dtype: DTypeLike = jnp.float32):
        self.heads, self.limit, self.dtype = heads, limit, dtype

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        return jnp.full((1, 1, self.heads), self.limit, self.dtype)

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        # Nothing here can be learned, and published fixed-span losses have no penalty.
        return jnp.zeros((), z_BTH.dtype)


class AdaptiveSpan(nnx.Module):
    """One learned span per head. Call `project` on the parameters after every update."""

    def __init__(self, heads: int, limit: int, dtype: DTypeLike = jnp.float32):
        self.limit = limit
        self.span_fraction_H = nnx.Param(jnp.zeros((heads,), dtype))

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        return self.limit * self.span_fraction_H[...][None, None, :]

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        return z_BTH.mean()


class DynamicSpan(nnx.Module):
    """One span per head and token, read off the layer's input."""

    def __init__(self, width: int, heads: int, limit: int, dtype: DTypeLike = jnp.float32):
        self.limit = limit
        # v starts at zero: every token then starts with the same small span S·σ(b), as the paper intends, whatever the
        # scale of the layer's input; heads come apart at once because their queries and keys differ.
        self.weight_DH = nnx.Param(jnp.zeros((width, heads), dtype))
        self.bias_H = nnx.Param(jnp.full((heads,), DYNAMIC_INITIAL_BIAS, dtype))

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        weight_DH, bias_H = self.weight_DH[...], self.bias_H[...]
        logit_BTH = jnp.einsum("BTD,DH->BTH", hidden_BTD.astype(weight_DH.dtype), weight_DH)
        return self.limit * jax.nn.sigmoid(logit_BTH + bias_H[None, None, :])

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        return z_BTH.mean()


def make_span(span: SpanConfig, width: int, heads: int, dtype: DTypeLike = jnp.float32) -> Span:
    """The span module that a config asks for."""
    if span.kind == "fixed":
        return FixedSpan(heads, span.limit, dtype)
    if span.kind == "adaptive":
        return AdaptiveSpan(heads, span.limit, dtype)
    return DynamicSpan(width, heads, span.limit, dtype)


def project(params: Tree) -> Tree:
    """Puts every z' of a parameter tree back into [0, 1]; call it after each update."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.clip(leaf, 0, 1) if "span_fraction_H" in jax.tree_util.keystr(path) else leaf, params
    )
