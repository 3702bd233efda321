"""A run that cannot fit is rejected before it starts, with the sizes and the fields that cause them."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from adaptive_span_jax.commands import train
from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import ScoredSegment, Streams
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference.capacity import check_reading
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.model import transformer
from adaptive_span_jax.runtime import capacity, sharding
from adaptive_span_jax.training import step
from adaptive_span_jax.training.capacity import check_training as check
from adaptive_span_jax.training.evaluation import check_streams
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import abstract_state
from tests.conftest import random_params, tiny_config


def check_training(config: Config, devices: int = 1) -> None:
    mesh = sharding.make_mesh(jax.devices()[:devices])
    check(config, abstract_state(config, 11, make_optimizer(config.train), mesh), mesh)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"batch_size": 10**7}}, r"training needs at least .* GiB segment memory \(config.train.batch_size"),
        ({"span": {"limit": 2**20}, "train": {"batch_size": 10**3}}, r"config\.span\.limit = 1048576"),
        ({"model": {"layers": 10**7}}, r"config\.model\.layers = 10000000"),
        ({"model": {"width": 50_000}}, r"GiB parameters and optimizer state \(.*config\.model\.width = 50000"),
        ({"model": {"feedforward": 4 * 10**8}}, r"GiB parameters and .*config\.model\.feedforward = 400000000"),
        ({"model": {"persistent": 4 * 10**8}}, r"GiB parameters and .*config\.model\.persistent = 400000000"),
        (
            {"evaluate": {"batch_size": 10**7}},
            r"evaluation during training needs at least .* GiB segment memory of the evaluation \(config\.evaluate",
        ),
    ],
)
def test_a_run_that_cannot_fit_is_refused(sections, expected):
    with pytest.raises(UserError, match=r"GiB of memory, this machine has [0-9.]+ GiB:") as refused:
        check_training(tiny_config(**sections))
    assert re.search(expected, str(refused.value).replace("\n", " ")), refused.value


def test_a_run_that_fits_is_not_refused():
    check_training(tiny_config())


def test_devices_of_a_cpu_share_its_memory(monkeypatch):
    config = tiny_config(train={"batch_size": 8}, evaluate={"batch_size": 8})
    needed = []
    monkeypatch.setattr(capacity, "_machine_bytes", lambda: 0)
    for devices in (1, 8):
        with pytest.raises(UserError) as refused:
            check_training(config, devices)
        kib = str(refused.value).split("segment memory")[0].split()[-2]
        needed.append(float(kib))
    # Streams are split over the devices: all of them together take what one takes.
    assert needed[0] == pytest.approx(needed[1], rel=0.01)


@pytest.mark.parametrize("persistent", [0, 5])
def test_what_is_refused_is_less_than_the_compiler_asks_for(persistent):
    """A lower bound, and not a useless one."""
    sizes = {"layers": 2, "attention": "plain", "persistent": persistent}
    config = tiny_config(train={"batch_size": 64, "segment": 64}, evaluate={"batch_size": 256}, model=sizes)
    mesh = sharding.make_mesh(jax.devices()[:1])
    state = abstract_state(config, 170, make_optimizer(config.train), mesh)
    memory = jax.eval_shape(lambda: transformer.init_memory(config, 256))
    shape: Any = jax.ShapeDtypeStruct((256, 64), np.int32)
    segment = ScoredSegment(shape, shape, cast(Any, jax.ShapeDtypeStruct((256, 64), bool)))
    lowered = cast(Any, step.make_eval_step(config, mesh)).lower(state.params, memory, segment)
    found = lowered.compile().memory_analysis().temp_size_in_bytes
    assert found / 8 < capacity.activation_bytes(config, mesh, 256, 64, 170) < found


def test_accelerators_have_their_own_memory():
    device = SimpleNamespace(platform="tpu", device_kind="TPU v5e", memory_stats=lambda: {"bytes_limit": 2**34})
    mesh: Any = SimpleNamespace(local_devices=[device] * 4)
    capacity.check(mesh, "training", {"state": 2**34})
    with pytest.raises(UserError, match=r"needs at least 16\.5 GiB of memory, a TPU v5e has 16\.0 GiB"):
        capacity.check(mesh, "training", {"state": 2**34, "more": 2**29})
    device.memory_stats = lambda: None  # nobody knows
    capacity.check(mesh, "training", {"state": 2**60})


def test_a_container_may_have_less_than_the_machine(monkeypatch, tmp_path):
    machine = capacity._machine_bytes()
    assert machine
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("1048576\n")
    monkeypatch.setattr(capacity, "_CONTAINER_LIMITS", (tmp_path / "max", tmp_path / "none"))
    assert (capacity._machine_bytes() or 0) >= machine
    monkeypatch.setattr(capacity, "_CONTAINER_LIMITS", (tmp_path / "max", tmp_path / "limit"))
    assert capacity._machine_bytes() == 1048576


def test_a_finished_model_refuses_streams_it_has_no_memory_for():
    config = tiny_config()
    finished, mesh = CachedDecoder.of(config, random_params(config, 11)), sharding.make_mesh(jax.devices()[:1])
    check_reading(finished, 2, 64, mesh, "generate.samples")
    with pytest.raises(UserError, match=r"generate\.samples = 1000000000 needs at least .* TiB "):
        check_reading(finished, 10**9, 64, mesh, "generate.samples")


@pytest.mark.parametrize(
    ("protocol", "most"),
    [("exact", 999), ("published", 71)],  # 1000 // (13 + 1)
)
def test_streams_must_have_something_to_score(protocol, most):
    def check(streams, size=1000):
        config = tiny_config()
        config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, batch_size=streams))
        check_streams(config, np.zeros(size, np.uint8), protocol, "dev")

    check(most)
    with pytest.raises(
        UserError, match=rf"config\.evaluate\.batch_size is {most + 1}, but dev .* make it at most {most}$"
    ):
        check(most + 1)
    with pytest.raises(UserError, match=r"use more text$"):
        check(1, size=1)


def test_training_streams_are_named_with_their_limit():
    Streams(np.zeros(260, np.uint8), 10, 13, seed=1)
    with pytest.raises(UserError, match=r"config\.train\.batch_size is 11, .* use more text, at most 10 streams or"):
        Streams(np.zeros(260, np.uint8), 11, 13, seed=1)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"evaluate": {"batch_size": 100_000}},
            r"config\.evaluate\.batch_size is 100000, but dev has only 1,000 tokens",
        ),
        (
            {"train": {"batch_size": 100_000}},
            r"config\.train\.batch_size is 100000, so each stream has 0 of the 18,000 tokens",
        ),
        ({"model": {"layers": 10**8}}, r"this machine has .* GiB"),
    ],
)
def test_training_refuses_before_it_starts(sections, expected, tmp_path, one_device, monkeypatch):
    monkeypatch.setattr(train, "create_state", lambda *_: pytest.fail("something was allocated"))
    with pytest.raises(UserError, match=expected):
        train.train(tiny_config(**sections), tmp_path, "command")
