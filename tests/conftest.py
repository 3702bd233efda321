"""Strict settings for every test: 8 CPU devices, no silent broadcasting between ranks, small configs."""

# ruff: noqa: E402
import importlib.util
import os
from pathlib import Path

# Also for the programs that tests start: with libtpu installed JAX would look for TPUs first.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Many tests compile the same small programs, in several processes.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

import hypothesis
import pytest
from ml_collections import ConfigDict

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import transformer
from adaptive_span_jax.runtime import sharding
from configs import base

# On a busy machine an example may take longer than the default of 200 ms, which says nothing about its result.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

MAKE_MESH = sharding.make_mesh

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -r requirements-tpu.txt"
)


@pytest.fixture
def x64():
    """64-bit mode for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing is read from or written to the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def use_devices(patch: pytest.MonkeyPatch, count: int) -> None:
    """Runs get a mesh of the first devices only."""
    patch.setattr(sharding, "make_mesh", lambda devices=None, fsdp=1: MAKE_MESH(devices or jax.devices()[:count], fsdp))


@pytest.fixture
def one_device(monkeypatch):
    """Runs of fewer streams than there are devices."""
    use_devices(monkeypatch, 1)


@pytest.fixture
def no_report(monkeypatch):
    """The report that ends a run takes longer than all the rest of a tiny one."""
    monkeypatch.setattr("adaptive_span_jax.report.report.write_report", lambda *_: None)


def tiny_fields(**sections: dict) -> ConfigDict:
    """The fields of a model that trains in seconds; sizes are distinct primes where they can be."""
    config = base.get_config()
    config.model.update(layers=3, width=22, heads=2, feedforward=29, dropout=0.0)
    config.span.update(limit=37, ramp=5, penalty=1e-4)
    config.train.update(batch_size=2, segment=13, steps=6, warmup_steps=3)
    config.data.source = "stdlib"
    config.data.max_bytes = 20_000
    config.evaluate.update(batch_size=2, every_steps=1000)
    config.checkpoint.every_steps = 1000
    for section, fields in sections.items():
        config[section].update(fields)
    return config


def tiny_config(**sections: dict) -> Config:
    """`tiny_fields`, checked."""
    return Config.from_dict(tiny_fields(**sections).to_dict())


def random_params(config, vocabulary):
    """Initial parameters, but with spans of all lengths."""
    params = transformer.init(config, vocabulary, jax.random.key(5))
    spans = params[transformer.LAYERS]["attention"].get("span", {})
    for name, leaf in spans.items():
        draw = jax.random.uniform if name == "span_fraction_H" else jax.random.normal
        spans[name] = draw(jax.random.key(3), leaf.shape, leaf.dtype)
    return params
