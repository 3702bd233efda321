"""How far each head looks back: the soft mask, and the three kinds of span.

A span module maps the layer's input to z, in positions, with a shape that broadcasts to [B, T, H]. The loss adds lambda
times its `penalty(z)`. The rest of the model does not depend on the kind:

    kind      z                                  learned            penalized
    fixed     S                                  nothing            no
    adaptive  S · z', one z' in [0, 1] per head  span_fraction_H    mean over heads
    dynamic   S · σ(vᵀx_t + b) per head, token   weight_DH, bias_H  mean over heads and tokens
"""

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from adaptive_span_jax.config import SpanConfig

Tree = TypeVar("Tree")
Array = TypeVar("Array", jax.Array, np.ndarray)

# The paper's b: dynamic spans start at S·σ(−4), a fiftieth of the limit.
DYNAMIC_INITIAL_BIAS = -4.0


@jax.custom_jvp
def _clip_to_unit(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0, 1)


@_clip_to_unit.defjvp
def _clip_to_unit_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # The derivative is 1 on the closed interval. At both ends, that of jnp.clip is 0.5 and that of lax.clamp is 0. The
    # published spans were trained with 1, and it matters: for most of training, most heads stay exactly at z = 0, where
    # the distances 1 and R + 1 are at these ends.
    (x,), (x_dot,) = primals, tangents
    return _clip_to_unit(x), jnp.where((x >= 0) & (x <= 1), x_dot, 0)


def soft_mask(distance: jax.Array, z: jax.Array, ramp: int) -> jax.Array:
    """m_z(x): 1 up to distance z + 1, then a ramp of length R down to 0.

    The paper has R + z − x; the published code, which we follow, has one more, so that z = 0 leaves exactly R non-zero
    positions.
    """
    return _clip_to_unit(_rest(distance, z, ramp) / ramp)


def on_ramp(distance: jax.Array, z: jax.Array, ramp: int) -> jax.Array:
    """Where `soft_mask` has a non-zero derivative with respect to z, namely 1/R; for hand-written gradients."""
    rest = _rest(distance, z, ramp)
    return (rest >= 0) & (rest <= ramp)


def _rest(distance: jax.Array, z: jax.Array, ramp: int) -> jax.Array:
    return ramp + z + 1 - distance


def reach(z: Array, ramp: int, limit: int) -> Array:
    """How many positions back a head with span z reads: beyond it the mask and its derivative are 0. NumPy or JAX."""
    xp: Any = z.__array_namespace__()
    return xp.minimum(xp.floor(z + ramp + 1), limit).astype(xp.int32)


# The reported span is min(z + R, S), in positions: it includes the ramp and is not rounded. A model's shortest and
# longest span are the minimum and maximum over its heads. Spans are stored unrounded and shown with one decimal.
# If a head's z depends on the token (dynamic spans), it is first averaged over tokens: over all scored tokens of dev in
# results and reports, over the tokens of the step in training logs.
# Only the average span has a rounded intermediate result, as in the paper's tables; see `average_span`.


def head_spans(z: np.ndarray, ramp: int, limit: int) -> np.ndarray:
    """Each head's span in positions: min(z + R, S); NaN where z is not finite."""
    z = np.asarray(z)
    return np.where(np.isfinite(z), np.minimum(z + ramp, limit), np.nan)


def average_span(z_LH: np.ndarray, ramp: int, limit: int) -> float:
    """The average span as published logs report it: the mean over layers of min(⌈mean z⌉ + R, S)."""
    return np.minimum(np.ceil(z_LH.mean(axis=1)) + ramp, limit).mean()


def mean_z(z_LBTH: jax.Array, counted_BT: ArrayLike) -> jax.Array:
    """Each head's z, averaged over the tokens where `counted_BT` is 1: z_LH."""
    if z_LBTH.shape[1:3] == (1, 1):
        return z_LBTH[:, 0, 0]
    counted_BT = jnp.asarray(counted_BT, z_LBTH.dtype)
    return jnp.einsum("LBTH,BT->LH", z_LBTH, counted_BT) / jnp.maximum(counted_BT.sum(), 1)


class Span(Protocol):
    """The interface of a span module."""

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        """z in positions, broadcastable to [B, T, H]."""
        ...

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        """The penalty in positions, which the loss multiplies by lambda."""
        ...


class FixedSpan(nnx.Module):
    """Every head has the full span S."""

    def __init__(self, heads: int, limit: int, dtype: DTypeLike = jnp.float32):
        self.heads, self.limit, self.dtype = heads, limit, dtype

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        return jnp.full((1, 1, self.heads), self.limit, self.dtype)

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        # Nothing is learned, and published fixed-span losses have no penalty.
        return jnp.zeros((), z_BTH.dtype)


class AdaptiveSpan(nnx.Module):
    """One learned span per head, at first z = `initial`. Call `project` on the parameters after every update."""

    def __init__(self, heads: int, limit: int, dtype: DTypeLike = jnp.float32, *, initial: float = 0.0):
        self.limit = limit
        self.span_fraction_H = nnx.Param(jnp.full((heads,), initial / limit, dtype))

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        return self.limit * self.span_fraction_H[...][None, None, :]

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        return z_BTH.mean()


class DynamicSpan(nnx.Module):
    """One span per head and token, computed from the layer's input."""

    def __init__(self, width: int, heads: int, limit: int, dtype: DTypeLike = jnp.float32):
        self.limit = limit
        # With v = 0, every token starts with the same small span S·σ(b), as the paper intends, for any scale of the
        # layer's input. Heads diverge from the first step on, because their queries and keys differ.
        self.weight_DH = nnx.Param(jnp.zeros((width, heads), dtype))
        self.bias_H = nnx.Param(jnp.full((heads,), DYNAMIC_INITIAL_BIAS, dtype))

    def __call__(self, hidden_BTD: jax.Array) -> jax.Array:
        weight_DH, bias_H = self.weight_DH[...], self.bias_H[...]
        logit_BTH = jnp.einsum("BTD,DH->BTH", hidden_BTD.astype(weight_DH.dtype), weight_DH)
        return self.limit * jax.nn.sigmoid(logit_BTH + bias_H[None, None, :])

    def penalty(self, z_BTH: jax.Array) -> jax.Array:
        return z_BTH.mean()


def make_span(span: SpanConfig, width: int, heads: int, dtype: DTypeLike = jnp.float32) -> Span:
    """The span module of a config."""
    if span.kind == "fixed":
        return FixedSpan(heads, span.limit, dtype)
    if span.kind == "adaptive":
        return AdaptiveSpan(heads, span.limit, dtype, initial=span.initial)
    return DynamicSpan(width, heads, span.limit, dtype)


def project(params: Tree) -> Tree:
    """The parameters with every z' of an `AdaptiveSpan` clipped to [0, 1]; call it after each update.

    Accepts any tree with the parameter names as keys: nested dicts or an `nnx.State`.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.clip(leaf, 0, 1) if _is_span_fraction(path) else leaf, params
    )


def _is_span_fraction(path: tuple) -> bool:
    """Whether the path of a leaf ends in the name of `AdaptiveSpan`'s parameter."""
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    if names[-1:] == ["value"]:  # of an nnx.Param, one level below its name
        names.pop()
    return names[-1:] == ["span_fraction_H"]
