"""How long a training step may take on a machine that is not here: counted work over published speeds.

Everything here is an estimate. A step takes the longer of two times, each at an assumed share of the chip's peak:

    arithmetic   2 · multiply-adds / (peak · 0.4)
    traffic      bytes to and from the chip's memory / (bandwidth · 0.7)

and besides, for every turn of the attention's far loops, a time that does not depend on its size: the loops' bounds are
values, so turns come one after the other. That time is assumed too, from what launching a handful of small programs
takes. Communication between chips, evaluation and checkpoints are left out.

*Multiply-adds* are ours (flops.py), because a compiler counts a loop whose bounds are values once. Forwards once; the
backward pass costs twice that, once for the inputs' and once for the weights' gradients; far tiles, scores of
persistent vectors, and with remat everything, are computed once more for it. *Bytes* are those of parameters and
optimizer (weights read forwards and backwards; gradients written and read; sums of squares and weights read and
written), and the compiler's temporaries, each written and read once. Far tiles are small enough to stay on the chip.
"""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import flops, span
from adaptive_span_jax.model.attention.inputs import FarShape
from adaptive_span_jax.planning.topology import Chip

ARITHMETIC_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
# Seconds for one turn of a far loop whatever its size. Assumed, never measured.
TURN_SECONDS = {"tpu": 10e-6, "cuda": 60e-6}

PROFILE = Path(__file__).with_name("trained_spans.json")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One training step at given spans."""

    multiply_adds: float  # on all chips
    turns: int  # of the far loops, in all passes of all groups of streams; the chips take them side by side
    seconds: float


def span_settings(config: Config) -> dict[str, np.ndarray]:
    """z_LH at the start, as after training, and with every head at S; fixed spans have only the last."""
    shape, limit = (config.model.layers, config.model.heads), config.span.limit
    longest = np.full(shape, float(limit))
    if config.span.kind == "fixed":
        return {"every head at S": longest}
    start = 0.0 if config.span.kind == "adaptive" else limit / (1 + np.exp(-span.DYNAMIC_INITIAL_BIAS))
    return {"start": np.full(shape, start), "trained profile": trained_profile(config), "every head at S": longest}


def trained_profile(config: Config) -> np.ndarray:
    """z_LH of `trained_spans.json`, resampled to the config's shape.

    By rule, not by training: each layer and head takes the z of the one at the same relative place, at most S.
    """
    profile_LH = np.array(json.loads(PROFILE.read_text())["z_LH"], float)
    rows, columns = (
        np.arange(count) * profile_LH.shape[axis] // count
        for axis, count in enumerate((config.model.layers, config.model.heads))
    )
    return np.minimum(profile_LH[rows][:, columns], config.span.limit)


def step_multiply_adds(config: Config, z_LH: np.ndarray, platform: str) -> float:
    """Multiply-adds of one whole training step on a platform, forwards and backwards, of all streams."""
    # With z this low every head reads one position, so all beyond that cost is the far part's.
    lowest_LH = jnp.full(z_LH.shape, -config.span.ramp, jnp.float32)
    shape = FarShape.on(platform)
    near = float(flops.executed_flops(config, lowest_LH, shape))
    far = float(flops.executed_flops(config, jnp.asarray(z_LH, jnp.float32), shape)) - near
    again = int(config.model.remat)
    persistent = config.model.layers * config.model.width * config.model.persistent
    return config.train.batch_size * config.train.segment * ((3 + again) * near + (4 + again) * far + persistent)


def estimate(
    config: Config, z_LH: np.ndarray, chip: Chip, chips: int, parameter_bytes: int, temporary_bytes: int
) -> Estimate:
    """One step at these spans; bytes are those of one chip."""
    multiply_adds = step_multiply_adds(config, z_LH, chip.platform)
    shape = FarShape.on(chip.platform)
    _, tiles_LHX = flops.far_tiles(config, jnp.asarray(z_LH, jnp.float32), shape)
    passes = config.train.grad_accum_steps * (2 + int(config.model.remat))
    tile_turns = 0 if shape.one_query_block(config.train.segment) else tiles_LHX.sum()
    turns = passes * int((tiles_LHX > 0).sum() + tile_turns)
    peak = chip.bfloat16_flops if config.model.compute_dtype == "bfloat16" else chip.float32_flops
    arithmetic = 2 * multiply_adds / chips / (peak * ARITHMETIC_SHARE)
    traffic = (8 * parameter_bytes + 2 * temporary_bytes) / (chip.bandwidth * BANDWIDTH_SHARE)
    return Estimate(multiply_adds, turns, max(arithmetic, traffic) + turns * TURN_SECONDS[chip.platform])
