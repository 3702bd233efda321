"""Training is the same however work is split over devices: data, fsdp, remat, gradient accumulation."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.testing import assert_allclose

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import abstract_state
from tests.conftest import tiny_config
from tests.support import training

VOCABULARY = 16
TEXT = np.random.default_rng(2).integers(0, VOCABULARY, 16 * 200).astype(np.uint8)

slow = pytest.mark.slow


def config_of(kind: str = "adaptive", model: dict | None = None, train: dict | None = None):
    """A model whose matrices 8 devices can share out, with dropout on and sixteen streams of text."""
    return tiny_config(
        span={"kind": kind},
        model={"width": 24, "heads": 3, "feedforward": 40, "dropout": 0.3} | (model or {}),
        train={"batch_size": 16, "segment": 13, "warmup_steps": 20} | (train or {}),
    )


run_steps = functools.partial(training.run_steps, ids=TEXT, vocabulary=VOCABULARY)


@functools.cache
def on_one_device(
    kind: str = "adaptive",
    attention: str = "per_head",
    dtype: str = "float32",
    sandwich: int = 0,
    persistent: int = 0,
    count: int = 50,
):
    sizes = {"attention": attention, "compute_dtype": dtype, "sandwich": sandwich, "persistent": persistent}
    nats, z_LH, *_ = run_steps(config_of(kind, sizes), sharding.make_mesh(jax.devices()[:1]), count)
    return nats, z_LH


@pytest.mark.parametrize("fsdp", [2, pytest.param(1, marks=slow), pytest.param(8, marks=slow)])
def test_eight_devices_train_like_one(fsdp):
    nats, z_LH = on_one_device()
    found, found_z_LH, state, _ = run_steps(config_of(), sharding.make_mesh(fsdp=fsdp), 50)
    assert_allclose(found, nats, rtol=1e-5)
    assert_allclose(found_z_LH, z_LH, rtol=1e-4, atol=1e-4)
    expand_LDF = state.params["layers"]["feedforward"]["expand_DF"]
    assert expand_LDF.addressable_shards[0].data.shape == (3, 24, 40 // fsdp)
    assert state.opt_state[0].sum_of_squares["layers"]["feedforward"]["expand_DF"].sharding == expand_LDF.sharding


@slow
@pytest.mark.parametrize(("sandwich", "fsdp"), [(2, 2), (1, 1), (1, 8), (3, 2)])
def test_eight_devices_train_like_one_in_sandwich_order(sandwich, fsdp):
    nats, z_LH = on_one_device(attention="plain", sandwich=sandwich, count=20)
    # Also with layers computed again, and in groups of streams.
    model = {"attention": "plain", "sandwich": sandwich, "remat": True}
    config = config_of(model=model, train={"grad_accum_steps": 2})
    found, found_z_LH, *_ = run_steps(config, sharding.make_mesh(fsdp=fsdp), 20)
    assert_allclose(found, nats, rtol=1e-5)
    assert_allclose(found_z_LH, z_LH, rtol=1e-4, atol=1e-4)


@slow
@pytest.mark.parametrize("fsdp", [1, 2, 8])
@pytest.mark.parametrize(
    ("kind", "attention", "persistent"),
    [
        ("fixed", "per_head", 0),
        ("adaptive", "per_head", 0),
        ("dynamic", "per_head", 0),
        ("adaptive", "plain", 0),
        ("adaptive", "per_head", 16),
        ("fixed", "plain", 16),
    ],
)
def test_eight_devices_train_like_one_in_float64(kind, attention, persistent, fsdp, x64):
    """Where roundings do not hide anything."""
    nats, z_LH = on_one_device(kind, attention, "float64", persistent=persistent)
    config = config_of(kind, {"attention": attention, "compute_dtype": "float64", "persistent": persistent})
    found, found_z_LH, *_ = run_steps(config, sharding.make_mesh(fsdp=fsdp), 50)
    assert_allclose(found, nats, rtol=1e-10)
    assert_allclose(found_z_LH, z_LH, rtol=1e-9, atol=1e-9)


def test_matrices_are_shared_out_by_the_rule():
    config = config_of()
    mesh = sharding.make_mesh(fsdp=4)
    state = abstract_state(config, VOCABULARY, make_optimizer(config.train), mesh)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4}
    layers = state.params["layers"]
    assert layers["feedforward"]["contract_FD"].sharding.spec == PartitionSpec(None, "fsdp", None)
    assert layers["attention"]["query_DHK"].sharding.spec == PartitionSpec(None, "fsdp", None, None)
    assert state.params["output_DV"].sharding.spec == PartitionSpec("fsdp", None)
    # Neither a vector, nor an odd matrix, nor the axis of layers.
    for leaf in (layers["feedforward"]["expand_bias_F"], layers["attention_norm"]["scale"], state.step):
        assert leaf.sharding.is_fully_replicated
    assert sharding.param_sharding(mesh, (4, 3, 5), stacked=True).is_fully_replicated
    # Streams are split over all devices.
    assert state.memory.hidden_LBMD.sharding.shard_shape(state.memory.hidden_LBMD.shape)[1] == 16 // 8


def test_a_mesh_that_devices_cannot_form():
    with pytest.raises(UserError, match=r"config.mesh.fsdp is 3, which does not divide the 8 devices"):
        sharding.make_mesh(fsdp=3)


@pytest.mark.parametrize(
    ("attention", "fsdp"),
    [("plain", 2), ("per_head", 1), ("per_head", 8)],
)
@slow
def test_layers_computed_again_give_the_same_training(attention, fsdp):
    nats, _ = on_one_device("adaptive", attention)
    config = config_of(model={"attention": attention, "remat": True})
    found, *_ = run_steps(config, sharding.make_mesh(fsdp=fsdp), 20)
    assert_allclose(found, nats[:20], rtol=1e-5)


def test_eight_devices_train_an_all_attention_network_like_one():
    config = config_of(model={"persistent": 16, "attention": "plain"})
    nats, *_ = run_steps(config, sharding.make_mesh(jax.devices()[:1]), 8)
    found, _, state, _ = run_steps(config, sharding.make_mesh(fsdp=2), 8)
    assert_allclose(found, nats, rtol=1e-5)
    value_LHUK = state.params["layers"]["attention"]["persistent"]["value_HUK"]
    assert value_LHUK.addressable_shards[0].data.shape == (3, 3, 8, 8)


@slow
def test_layers_computed_again_give_the_same_all_attention_network():
    nats, *_ = on_one_device("adaptive", "plain", persistent=16)
    sizes = {"persistent": 16, "attention": "plain", "remat": True}
    found, *_ = run_steps(config_of(model=sizes), sharding.make_mesh(fsdp=2), 20)
    assert_allclose(found, nats[:20], rtol=1e-5)


@slow
@pytest.mark.parametrize("attention", ["plain", "per_head"])
def test_memory_in_bfloat16(attention):
    nats, _ = on_one_device("adaptive", attention)
    config = config_of(model={"attention": attention, "memory_dtype": "bfloat16"})
    found, _, state, _ = run_steps(config, sharding.make_mesh(jax.devices()[:1]), 12)
    assert state.memory.hidden_LBMD.dtype == "bfloat16"
    assert state.params["output_DV"].dtype == "float32"
    # Roundings of 0.4 % in what is remembered; losses of about 2.8 nats.
    assert_allclose(found, nats[:12], atol=0.02)
    assert np.abs(found - nats[:12]).max() > 0


@pytest.mark.parametrize(
    ("attention", "devices", "fsdp"),
    [("plain", 8, 2), *(pytest.param("per_head", devices, 1, marks=slow) for devices in (1, 8))],
)
@pytest.mark.parametrize("kind", ["adaptive", pytest.param("dynamic", marks=slow)])
def test_groups_of_streams_give_the_same_training(kind, attention, devices, fsdp):
    nats, z_LH = on_one_device(kind, attention)
    config = config_of(kind, {"attention": attention}, {"grad_accum_steps": 2})
    found, found_z_LH, *_ = run_steps(config, sharding.make_mesh(jax.devices()[:devices], fsdp), 50)
    assert_allclose(found, nats, rtol=1e-5)
    assert_allclose(found_z_LH, z_LH, rtol=1e-4, atol=1e-4)


def test_groups_that_devices_cannot_form():
    with pytest.raises(UserError, match=r"batch_size is 16, .* × 3 groups .*; make it a multiple of 24"):
        sharding.check_streams(sharding.make_mesh(), 16, 3)
