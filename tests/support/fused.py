"""Cases for the fused kernels: inputs, the float64 oracle, and a simulated TPU."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adaptive_span_jax.model.attention import fused, reference
from adaptive_span_jax.model.memory import ring_rows
from tests.support.attention import draw, draw_ring, errors, plain_run, run, with_end

RAMP = 32


class Case(NamedTuple):
    """What a program is compiled for; all else is drawn."""

    length: int
    limit: int
    heads: int
    head_width: int
    rate: float = 0.3
    streams: int = 2
    per_token: bool = False
    masks_empty: bool = False
    memory_dtype: Any = np.float32
    log_sum: bool = False  # whether the loss depends on it, as with persistent vectors

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    @property
    def ends(self) -> list[int]:
        """All positions of the ring."""
        return list(range(0, ring_rows(self.limit, self.length), self.length))


@functools.cache
def inputs(case: Case) -> dict:
    arrays = draw(case.streams, case.length, case.limit, case.heads, case.width, np.float32, log_sum=case.log_sum)
    return arrays | {"memory": draw_ring(case.streams, case.limit, case.length, case.width, case.memory_dtype)}


def to_float64(arrays: dict) -> dict:
    return jax.tree.map(lambda x: x if np.issubdtype(x.dtype, np.integer) else x.astype(np.float64), arrays)


def exact(arrays: dict, z: np.ndarray, valid_length: Any, seed: int, rate: float) -> dict:
    """What plain attention computes of the same numbers in float64."""
    with jax.enable_x64(True):
        found = run(reference, to_float64(arrays), z.astype(np.float64), valid_length, seed, ramp=RAMP, rate=rate)
        return jax.device_get(found)


def check(case: Case, z: Any, end: int = 0, seed: int = 1, valid_length: int | None = None) -> None:
    """Asserts that the kernels compute what plain attention computes; z by head, or by stream, token and head."""
    z_BTH = np.asarray(z, np.float32)
    z_BTH = z_BTH if case.per_token else z_BTH[None, None]
    valid = None if valid_length is None else np.int32(valid_length)
    assert case.masks_empty == (valid is not None)
    arrays = with_end(inputs(case), end)
    # If d_output was only random, the gradient of a z that all tokens share would be the little that is left of parts
    # that cancel. With this part of d_output they have the same sign, so that the sum is as exact in float32 as they.
    output = exact(arrays, z_BTH, valid, seed, case.rate)["output"]
    arrays["d_output"] = (arrays["d_output"] - 2 * output).astype(np.float32)
    if case.log_sum:
        arrays["d_log_sum"] = np.abs(arrays["d_log_sum"])
    expected = exact(arrays, z_BTH, valid, seed, case.rate)
    found = jax.device_get(run(fused, arrays, z_BTH, valid, seed, ramp=RAMP, rate=case.rate))
    for name, error in errors(found, expected).items():
        assert error < 1e-5, (name, error)


def simulate(monkeypatch: pytest.MonkeyPatch, arrays: dict, z_BTH: np.ndarray, rate: float, **options: Any) -> dict:
    """The kernels' results on a simulated TPU, whose memory is NaN at first."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", **options)
    interpreted = pl.pallas_call
    with monkeypatch.context() as patch:
        patch.setattr(
            pl, "pallas_call", lambda *args, interpret, **kwargs: interpreted(*args, interpret=params, **kwargs)
        )
        return jax.device_get(jax.jit(lambda arrays: plain_run(fused, arrays, z_BTH, ramp=RAMP, rate=rate))(arrays))
