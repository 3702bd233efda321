"""How far back each head of a decoder reads: known before compiling, because its weights are fixed.

kind      a head reads at most …
fixed     S positions
adaptive  `span.reach` of the z it learned
dynamic   the same, for the largest z that any input could produce
"""

from typing import NamedTuple

import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model.span import reach
from adaptive_span_jax.model.transformer import LAYERS, Params

# The maximum positions that attention reads at once. Ring lengths are multiples of it, so that no chunk wraps around.
CHUNK = 64


class HeadGroup(NamedTuple):
    """Heads of one layer that are computed together, because their rings have the same length."""

    heads: tuple[int, ...]
    rows: int  # M, the length of a ring: the reach of the heads plus a chunk


# The groups of every layer.
CachePlan = tuple[tuple[HeadGroup, ...], ...]


def plan(config: Config, params: Params) -> CachePlan:
    """The groups of heads of every layer, with the lengths of their rings."""
    rows_LH = -(-(head_reach(config, params) + CHUNK) // CHUNK) * CHUNK
    return tuple(
        tuple(HeadGroup(tuple(np.flatnonzero(rows_H == rows).tolist()), int(rows)) for rows in np.unique(rows_H))
        for rows_H in rows_LH
    )


def head_reach(config: Config, params: Params) -> np.ndarray:
    """How many positions back each head can read, whatever the input: reach_LH."""
    return reach(largest_z(config, params), config.span.ramp, config.span.limit)


def largest_z(config: Config, params: Params) -> np.ndarray:
    """Each head's z in positions, z_LH; for dynamic spans the largest that any input could produce."""
    limit, shape = config.span.limit, (config.model.layers, config.model.heads)
    if config.span.kind == "fixed":
        return np.full(shape, limit)
    span = params[LAYERS]["attention"]["span"]
    if config.span.kind == "adaptive":
        # In the dtype in which the model computes it, so that it rounds the same.
        fraction_LH = np.asarray(span["span_fraction_H"])
        return fraction_LH.dtype.type(limit) * fraction_LH
    weight_LDH, bias_LH = np.asarray(span["weight_DH"], np.float64), np.asarray(span["bias_H"], np.float64)
    logit_LH = np.array([_largest_logit(params, layer, weight_DH) for layer, weight_DH in enumerate(weight_LDH)])
    return limit / (1 + np.exp(-(logit_LH + bias_LH)))


def _largest_logit(params: Params, layer: int, weight_DH: np.ndarray) -> np.ndarray:
    """The largest vᵀx over all inputs x that a layer can get, for every head."""
    if layer == 0:
        input_ND = np.asarray(params["embedding_VD"], np.float64)
        center_D, radius_D = np.zeros(input_ND.shape[1]), np.abs(input_ND).max(axis=0)
        largest_H = (input_ND @ weight_DH).max(axis=0)
    else:
        # The input is the output of a LayerNorm: scale · n + bias with ‖n‖ ≤ √D.
        layers = params[LAYERS]
        norm = layers.get("feedforward_norm", layers["attention_norm"])
        scale_D, center_D = (np.asarray(norm[name], np.float64)[layer - 1] for name in ("scale", "bias"))
        radius_D = np.abs(scale_D) * np.sqrt(len(scale_D))
        largest_H = center_D @ weight_DH + np.linalg.norm(scale_D[:, None] * weight_DH, axis=0) * len(scale_D) ** 0.5
    # Inputs may be rounded to bfloat16, with a relative error of at most 2⁻⁸.
    return largest_H + 2**-8 * (np.abs(center_D) + radius_D) @ np.abs(weight_DH)
