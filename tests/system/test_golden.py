"""Golden runs of the published code, replayed through the production code in float64."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaptive_span_jax.runtime import sharding
from tests.golden.replay import PATHS, TOLERANCE, main, replay
from tests.support import published_run

FILES = sorted((Path(__file__).parents[1] / "golden").glob("*.npz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_replay(path: Path, x64):
    errors = replay(path, "per_head")
    assert len(errors) > 50
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_replay_by_plain_attention(path: Path, x64):
    errors = replay(path, "plain")
    assert len(errors) > 50
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize("fsdp", [1, 2, 8])
def test_replay_on_eight_devices(fsdp: int, attention: str, x64):
    errors = replay(FILES[0], attention, sharding.make_mesh(fsdp=fsdp))
    assert len(errors) > 50
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


# Sizes that no golden file has: fixed spans, one head, one persistent vector, more of them than positions in the span.
@pytest.mark.slow
@pytest.mark.parametrize("attention", PATHS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"adapt_span": False, "span_loss": 0.0},
        {"pers_mem_size": 1, "nb_heads": 1, "attn_span": 70, "block_size": 9},
        {"pers_mem_size": 40, "nb_layers": 1, "nb_heads": 4, "ramp": 30},
        {"adapt_span": False, "span_loss": 0.0, "pers_mem_size": 23, "nb_heads": 3, "attn_span": 5, "batch_size": 1},
    ],
    ids=lambda sizes: ",".join(f"{name}={value}" for name, value in sizes.items()),
)
def test_replay_of_other_all_attention_networks(sizes: dict[str, Any], attention: str, tmp_path: Path, x64):
    published_run.write_golden(tmp_path / "golden.npz", **sizes)
    errors = replay(tmp_path / "golden.npz", attention)
    assert len(errors) > 40
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


@pytest.mark.slow
def test_the_equations_give_the_golden_numbers(x64):
    golden = dict(np.load(FILES[0].with_name("persistent_tiny.npz")))
    weights = {name.removeprefix("init/"): array for name, array in golden.items() if name.startswith("init/")}
    sizes = json.loads(str(golden["config"]))
    found = published_run.train(sizes, weights, golden["tokens"], golden["eval_tokens"])
    assert {*golden} - {*found} == {"cache_size"}
    for name in {*found} - {"config"}:
        np.testing.assert_allclose(found[name], golden[name], atol=TOLERANCE * np.abs(golden[name]).max(), rtol=0)


def test_replay_needs_a_file(capsys):
    assert main([]) == 2
    assert main(["nowhere.npz"]) == 2
    assert "nowhere.npz: no such file" in capsys.readouterr().out
