"""The model FLOPs utilization of a run."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from adaptive_span_jax.training.metrics import utilization
from tests.conftest import tiny_config


def test_utilization():
    """By hand: 12 layers of 4·512² + 2·512·2048 + 2·314·512 multiply-adds are 41.6 million per token."""
    devices: Any = [SimpleNamespace(device_kind="TPU v5 lite")] * 8
    sizes = {"layers": 12, "width": 512, "heads": 8, "feedforward": 2048}
    config = tiny_config(model=sizes | {"compute_dtype": "bfloat16"})
    tokens = 1_000_000
    assert utilization(config, 314, tokens, devices) == pytest.approx(6 * 41.6e6 * tokens / (8 * 197e12), rel=1e-3)
    gpu: Any = [SimpleNamespace(device_kind="NVIDIA A100-SXM4-40GB")]
    half = utilization(config, 314, tokens, gpu)
    assert utilization(tiny_config(model=sizes), 314, tokens, gpu) == pytest.approx(2 * half)


def test_no_utilization_where_the_peak_is_not_known():
    assert math.isnan(utilization(tiny_config(), 32, 1000, jax.devices()))
