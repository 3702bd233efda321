"""How far back each head of a finished model reads, known before anything is compiled because weights no longer change.

kind      a head reads at most …
fixed     S positions
adaptive  ⌊z + R + 1⌋ positions, z being what it learned
dynamic   the same, with the largest z that any input at all could give it
"""

from typing import NamedTuple

import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import LAYERS, Params

# Positions that are read at once, at most. Rings are a multiple of it, so that no chunk wraps around in one.
CHUNK = 64


class HeadGroup(NamedTuple):
    """Heads of one layer that are computed together, because their keys need rings of the same length."""

    heads: tuple[int, ...]
    rows: int  # M, the length of a ring: as far as the heads read, and a chunk besides


# The groups of every layer.
Plan = tuple[tuple[HeadGroup, ...], ...]


def plan(config: Config, params: Params) -> Plan:
    """Which heads are computed together, and how many positions are kept for them."""
    rows_LH = -(-(head_reach(config, params) + CHUNK) // CHUNK) * CHUNK
    return tuple(
        tuple(HeadGroup(tuple(np.flatnonzero(rows_H == rows).tolist()), int(rows)) for rows in np.unique(rows_H))
        for rows_H in rows_LH
    )


def head_reach(config: Config, params: Params) -> np.ndarray:
    """How many positions back each head can read: reach_LH."""
    z_LH = largest_z(config, params)
    return np.minimum(np.floor(z_LH + config.span.ramp + 1), config.span.limit).astype(np.int64)


def largest_z(config: Config, params: Params) -> np.ndarray:
    """Each head's z in positions; of a dynamic one the largest that any input could give it."""
    limit, shape = config.span.limit, (config.model.layers, config.model.heads)
    if config.span.kind == "fixed":
        return np.full(shape, limit)
    span = params[LAYERS]["attention"]["span"]
    if config.span.kind == "adaptive":
        # In the type in which the model computes it, so that rounding is the same.
        fraction_LH = np.asarray(span["span_fraction_H"])
        return fraction_LH.dtype.type(limit) * fraction_LH
    weight_LDH, bias_LH = np.asarray(span["weight_DH"], np.float64), np.asarray(span["bias_H"], np.float64)
    logit_LH = np.array([_largest_logit(params, layer, weight_DH) for layer, weight_DH in enumerate(weight_LDH)])
    return limit / (1 + np.exp(-(logit_LH + bias_LH)))


def _largest_logit(params: Params, layer: int, weight_DH: np.ndarray) -> np.ndarray:
    """The largest vᵀx that a layer's input x can give, for every head."""
    if layer == 0:
        input_ND = np.asarray(params["embedding_VD"], np.float64)
        centre_D, radius_D = np.zeros(input_ND.shape[1]), np.abs(input_ND).max(axis=0)
        largest_H = (input_ND @ weight_DH).max(axis=0)
    else:
        # The input is scale · n + bias with ‖n‖ ≤ √D, because LayerNorm has made it.
        norm = params[LAYERS]["feedforward_norm"]
        scale_D, centre_D = (np.asarray(norm[name], np.float64)[layer - 1] for name in ("scale", "bias"))
        radius_D = np.abs(scale_D) * np.sqrt(len(scale_D))
        largest_H = centre_D @ weight_DH + np.linalg.norm(scale_D[:, None] * weight_DH, axis=0) * len(scale_D) ** 0.5
    # Inputs may be rounded to bfloat16, by 2⁻⁸ of themselves at most.
    return largest_H + 2**-8 * (np.abs(centre_D) + radius_D) @ np.abs(weight_DH)
