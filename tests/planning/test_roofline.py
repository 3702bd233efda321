"""Counted work and the time it may take."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_span_jax.model import flops
from adaptive_span_jax.planning import roofline
from adaptive_span_jax.planning.topology import CHIPS
from tests.conftest import tiny_config


def large(**span: object):
    model = {"layers": 24, "width": 768, "heads": 8, "feedforward": 4096}
    return tiny_config(
        model=model,
        span={"limit": 8192, "ramp": 32, **span},
        train={"batch_size": 64, "segment": 512, "steps": 170_000},
    )


def test_step_counts_forward_once_and_backward_twice():
    config = large()
    start = np.zeros((24, 8))
    # By hand: a layer's products per token are 4 d² + 2 d·FF, and the near window's few; the paper's count has those.
    dense = 24 * (4 * 768**2 + 2 * 768 * 4096)
    found = roofline.step_multiply_adds(config, start, "tpu")
    assert 1 < found / (3 * 64 * 512 * dense) < 1.15
    again = dataclasses.replace(config, model=dataclasses.replace(config.model, remat=True))
    assert roofline.step_multiply_adds(again, start, "tpu") == pytest.approx(found * 4 / 3)


def test_far_tiles_are_counted_four_times():
    config = large()
    start, longest = np.zeros((24, 8)), np.full((24, 8), 8192.0)
    far = float(flops.executed_flops(config, jnp.array(longest)) - flops.executed_flops(config, jnp.array(start)))
    more = roofline.step_multiply_adds(config, longest, "tpu") - roofline.step_multiply_adds(config, start, "tpu")
    np.testing.assert_allclose(more, 64 * 512 * 4 * far, rtol=1e-5)


def test_a_wide_ramp_is_far_work_too():
    narrow, wide = large(), large(ramp=1000)
    z_LH = np.zeros((24, 8))
    assert roofline.step_multiply_adds(wide, z_LH, "tpu") > 1.1 * roofline.step_multiply_adds(narrow, z_LH, "tpu")


def test_time_is_the_slower_of_arithmetic_and_traffic_and_the_loops_turns():
    config, chip, z_LH = large(), CHIPS["v5e"], np.zeros((24, 8))
    arithmetic = 2 * roofline.step_multiply_adds(config, z_LH, "tpu") / 8 / (0.4 * 197e12)
    assert roofline.estimate(config, z_LH, chip, 8, 0, 0).seconds == pytest.approx(arithmetic)
    much = 10**13
    assert roofline.estimate(config, z_LH, chip, 8, 0, much).seconds == pytest.approx(2 * much / (0.7 * 819e9))
    longest = roofline.estimate(config, np.full((24, 8), 8192.0), chip, 8, 0, 0)
    assert longest.turns > 2 * 24 * 8 * 64  # each head reads 64 blocks of memory, forwards and backwards
    split = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_accum_steps=4))
    assert roofline.estimate(split, np.full((24, 8), 8192.0), chip, 8, 0, 0).turns == 4 * longest.turns
    assert longest.seconds > longest.turns * roofline.TURN_SECONDS["tpu"]


def test_gpus_take_few_turns():
    config = large()
    profile = roofline.trained_profile(config)
    found, small = (roofline.estimate(config, profile, CHIPS[chip], 8, 0, 0) for chip in ("a100", "v5e"))
    assert found.turns == 344
    assert small.turns == 5252
    assert found.multiply_adds > small.multiply_adds  # more of it masked out


@pytest.mark.parametrize(("layers", "heads", "limit"), [(12, 8, 8192), (24, 8, 8192), (8, 4, 1024), (5, 3, 100)])
def test_profile_keeps_its_order_and_the_limit(layers, heads, limit):
    config = tiny_config(model={"layers": layers, "heads": heads, "width": 24 * heads}, span={"limit": limit})
    z_LH = roofline.trained_profile(config)
    assert z_LH.shape == (layers, heads)
    assert z_LH.max() <= limit
    assert z_LH[0].max() == 0 < z_LH[-1].max() or layers < 8  # low layers stay at the ramp
    if (layers, heads) == (12, 8):
        assert round(float(np.minimum(np.ceil(z_LH.mean(axis=1)) + 32, limit).mean())) == 314


def test_settings_follow_the_kind_of_span():
    adaptive, dynamic, fixed = (
        roofline.span_settings(dataclasses.replace(config, span=dataclasses.replace(config.span, kind=kind)))
        for config in [large()]
        for kind in ("adaptive", "dynamic", "fixed")
    )
    assert list(adaptive) == ["start", "trained profile", "every head at S"]
    assert adaptive["start"].max() == 0
    np.testing.assert_allclose(dynamic["start"], 8192 * 0.01798621, rtol=1e-6)
    assert list(fixed) == ["every head at S"]
    assert fixed["every head at S"].min() == 8192
