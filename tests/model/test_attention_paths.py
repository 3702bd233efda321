"""Which path computes the attention, and why not the fused kernels."""

import dataclasses
import re
from typing import Any

import pytest

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model.attention import fused, paths, per_head, persistent, reference
from adaptive_span_jax.model.attention.fused import persistent as fused_persistent
from adaptive_span_jax.runtime import sharding
from configs import enwik8_large, enwik8_persistent, enwik8_small, quickstart, text8_dynamic, text8_fixed

SIZES: dict[str, Any] = {
    "segment": 512,
    "width": 512,
    "heads": 8,
    "limit": 8192,
    "ring": 8192,
    "dtype": "bfloat16",
    "platform": "tpu",
}


def choose(asked: str = "auto", **changes: Any) -> paths.Choice:
    return paths.choose(asked, **(SIZES | changes))


def test_tpus_get_the_kernels_and_others_do_not():
    assert choose() == ("fused", None)
    for platform in ("cpu", "gpu", "cuda"):
        assert choose(platform=platform) == ("per_head", f"the fused kernels are for TPUs, not {platform}")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"segment": 500}, "train.segment = 500 is not a multiple of 128 up to 1024"),
        ({"segment": 64}, "train.segment = 64 is not"),
        ({"segment": 1152}, "train.segment = 1152 is not"),
        ({"limit": 700, "ring": 700}, "a memory of 700 positions is not a multiple of 128"),
        ({"width": 448, "heads": 7}, "model.width = 448 is not a multiple of 128"),
        ({"heads": 2}, "model.width = 512 is not a multiple of 128 with heads of at most 128"),
        ({"limit": 131_072, "ring": 131_072}, "span.limit = 131072 and model.width = 512 would need 80 MiB of VMEM"),
        (
            {"segment": 1024, "width": 1024, "dtype": "float32"},
            "span.limit = 8192 and model.width = 1024 would need 84",
        ),
        ({"dtype": "float64"}, "model.compute_dtype = float64 is neither float32 nor bfloat16"),
    ],
)
def test_sizes_that_the_kernels_do_not_support(changes, reason):
    name, found = choose(**changes)
    assert name == "per_head"
    assert found is not None
    assert found.startswith(reason)
    with pytest.raises(UserError, match=f"config.model.attention is fused, but {re.escape(reason)}"):
        choose("fused", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"segment": 128},
        {"segment": 1024},
        {"limit": 900, "ring": 1024},
        {"width": 768},
        {"width": 256},
        {"heads": 4},
        {"dtype": "float32"},
    ],
)
def test_sizes_that_the_kernels_support(changes):
    assert choose(**changes) == ("fused", None)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_path_that_was_asked_for_is_taken(platform):
    assert choose("fused", platform=platform) == ("fused", None)
    for asked in ("per_head", "plain"):
        assert choose(asked, platform=platform) == (asked, f"model.attention = {asked}")


@pytest.mark.parametrize(
    "module", [enwik8_small, enwik8_large, enwik8_persistent, text8_dynamic, text8_fixed, quickstart]
)
def test_the_configs_run_the_kernels_on_tpus(module):
    config = Config.from_dict(module.get_config().to_dict())
    assert paths.choose_for(config, "tpu") == ("fused", None)
    assert paths.choose_for(config, "cpu") == ("per_head", "the fused kernels are for TPUs, not cpu")
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="plain"))
    assert paths.choose_for(plain, "tpu") == ("plain", "model.attention = plain")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"persistent_vectors": 1000}, "model.persistent = 1000 is not a multiple of 128"),
        ({"persistent_vectors": 1024, "width": 768}, "heads of 96 are none of 32, 64, 128"),
        (
            {"persistent_vectors": 16_384, "segment": 1024, "dtype": "float32"},
            "model.persistent = 16384 would need 108 MiB of VMEM, of which 56 MiB can be used",
        ),
    ],
)
def test_persistent_vectors_that_the_kernels_do_not_support(changes, reason):
    for asked in ("auto", "fused"):
        choice = choose(asked, **changes)
        assert choice == ("fused", f"persistent vectors by XLA: {reason}")
        assert paths.describe(choice) == f"fused TPU kernels (persistent vectors by XLA: {reason})"


@pytest.mark.parametrize(
    "changes", [{}, {"persistent_vectors": 8192}, {"heads": 4}, {"heads": 16}, {"segment": 1024, "dtype": "float32"}]
)
def test_persistent_vectors_that_the_kernels_support(changes):
    assert choose(**({"persistent_vectors": 1024} | changes)) == ("fused", None)


def test_the_platform_is_the_one_that_is_traced_for(monkeypatch):
    def of(asked: str = "auto", **changes: Any) -> paths.Path:
        sizes = SIZES | {"persistent_vectors": 1024} | changes
        return paths.path_of(asked, **{name: value for name, value in sizes.items() if name != "platform"})

    assert of() == (per_head.attend, persistent.join)
    assert of("plain") == (reference.attend, persistent.join)
    assert of("fused") == (fused.attend, fused_persistent.join)
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    assert of() == (fused.attend, fused_persistent.join)
    assert of(persistent_vectors=1000) == (fused.attend, persistent.join)
    assert of(segment=100) == (per_head.attend, persistent.join)
