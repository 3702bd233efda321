"""Training with the fused kernels, interpreted: the same as with the per-head path, however work is split."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

from adaptive_span_jax.config import Config
from adaptive_span_jax.model.transformer import LAYERS
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import TrainState, create_state
from tests.conftest import tiny_config
from tests.support import training

VOCABULARY = 16


def repetitive_text(length: int) -> np.ndarray:
    """Something to learn, from tokens 100 positions back: a tenth of it is noise."""
    rng = np.random.default_rng(2)
    ids = np.resize(rng.integers(0, VOCABULARY, 100), length)
    return np.where(rng.uniform(size=length) < 0.1, rng.integers(0, VOCABULARY, length), ids).astype(np.uint8)


TEXT = repetitive_text(16 * 128 * 9)

pytestmark = pytest.mark.slow


def config_of(kind: str = "adaptive", model: dict | None = None, train: dict | None = None) -> Config:
    """The smallest model that the kernels take, with dropout on and sixteen streams of text.

    With the default learning rate, steps so short after the start double every rounding error, on any path.
    """
    sizes = {"layers": 2, "width": 128, "heads": 2, "feedforward": 64, "dropout": 0.3, "attention": "fused"}
    return tiny_config(
        span={"kind": kind, "limit": 512, "ramp": 32},
        model=sizes | (model or {}),
        train={"batch_size": 16, "segment": 128, "warmup_steps": 20, "learning_rate": 0.005} | (train or {}),
    )


def state_of(config: Config, mesh: Any) -> TrainState:
    """An initial state, but with spans of all lengths: a run would need long to get there."""
    state = create_state(config, VOCABULARY, make_optimizer(config.train), mesh)
    span = state.params[LAYERS]["attention"].get("span", {})
    rng = np.random.default_rng(0)
    for name, leaf in span.items():
        drawn = {
            "span_fraction_H": np.array([[0.0, 0.9], [0.4, 0.02]]),
            "weight_DH": 0.02 * rng.standard_normal(leaf.shape),
            "bias_H": np.array([[-4.0, 0.0], [1.0, -2.0]]),
        }[name]
        span[name] = jax.device_put(drawn.astype(np.float32), leaf.sharding)
    return state


def run_steps(config: Config, mesh: Any, count: int) -> training.Trained:
    return training.run_steps(config, mesh, count, ids=TEXT, vocabulary=VOCABULARY, state=state_of(config, mesh))


@functools.cache
def on_one_device(kind: str = "adaptive", attention: str = "fused", count: int = 10) -> tuple[np.ndarray, np.ndarray]:
    config = config_of(kind, {"attention": attention})
    nats, z_LH, *_ = run_steps(config, sharding.make_mesh(jax.devices()[:1]), count)
    return nats, z_LH


def check(config: Config, mesh: Any, kind: str = "adaptive") -> None:
    """Asserts that these steps are those of one device."""
    nats, z_LH = on_one_device(kind)
    found, found_z_LH, *_ = run_steps(config, mesh, len(nats))
    assert_allclose(found, nats, rtol=1e-5)
    assert_allclose(found_z_LH, z_LH, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "fsdp"), [("adaptive", 1), ("adaptive", 2), ("dynamic", 2), ("fixed", 1)])
def test_eight_devices_train_like_one(kind, fsdp):
    check(config_of(kind), sharding.make_mesh(fsdp=fsdp), kind)


@pytest.mark.parametrize("devices", [1, 8])
def test_groups_of_streams_give_the_same_training(devices):
    check(config_of(train={"grad_accum_steps": 2}), sharding.make_mesh(jax.devices()[:devices]))


def test_layers_computed_again_give_the_same_training():
    check(config_of(model={"remat": True}), sharding.make_mesh(fsdp=2))


# With dynamic spans, rounding errors grow: after 50 steps the per-head path on eight devices is at spans that differ by
# 0.4 from those on one, as do the kernels'.
@pytest.mark.parametrize(("kind", "count"), [("adaptive", 50), ("dynamic", 20)])
def test_steps_are_those_of_the_per_head_path(kind, count):
    fused, z_LH = on_one_device(kind, "fused", count)
    per_head, per_head_z_LH = on_one_device(kind, "per_head", count)
    assert_allclose(fused, per_head, atol=1e-4, rtol=0)
    assert_allclose(z_LH, per_head_z_LH, atol=0.01)
    assert per_head[-1] < per_head[0] - 0.3


def test_empty_memory_is_masked_like_by_the_per_head_path():
    runs = [
        run_steps(
            config_of(model={"attention": attention, "mask_empty_memory": True}),
            sharding.make_mesh(jax.devices()[:1]),
            8,
        )
        for attention in ("fused", "per_head")
    ]
    assert_allclose(runs[0].nats, runs[1].nats, atol=1e-4, rtol=0)
    assert np.abs(runs[0].nats - on_one_device()[0][:8]).max() > 1e-4
