"""Golden runs of the published code, replayed through the production code in float64."""

from pathlib import Path

import pytest

from adaptive_span_jax.runtime import sharding
from tests.golden.replay import PATHS, TOLERANCE, main, replay

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


def test_replay_needs_a_file(capsys):
    assert main([]) == 2
    assert main(["nowhere.npz"]) == 2
    assert "nowhere.npz: no such file" in capsys.readouterr().out
