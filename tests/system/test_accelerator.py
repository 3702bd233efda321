"""The measurement for whoever has an accelerator, tried out on CPUs."""

import json
from typing import Any

import jax
import pytest

from benchmarks import accelerator


@pytest.mark.slow  # compiles a train step for eight devices
def test_tiny_models_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "MODELS", ("enwik8",))
    monkeypatch.setattr(accelerator, "STREAMS_A_DEVICE", 1)
    monkeypatch.setattr(accelerator, "ROUNDS", 2)
    output = tmp_path / "found.json"
    assert accelerator.main(["--tiny", "--seconds=0.01", f"--output={output}"]) == 0
    found = json.loads(output.read_text())
    assert (found["device_kind"], found["devices"], found["tiny"]) == ("cpu", 8, True)
    assert found["packages"]["jax"] == jax.__version__
    assert [case["spans"] for case in found["cases"]] == ["start", "trained", "2048"]
    start, trained, long = found["cases"]
    for case in (start, trained, long):
        assert 0 < case["fastest_ms"] <= case["ms"] <= case["slowest_ms"]
        assert case["tokens_per_second"] == pytest.approx(8 * 128 / case["ms"] * 1e3)
        assert case["compiled_bytes"] > 0
        assert 4 < case["nats"] < 7
    # Every head reaches all of S = 256: two blocks of 128 keys and the segment's block, of one tile each but for the
    # segment's rows, for two heads in two layers, forward and backward.
    assert (start["far_tiles_a_stream"], start["turns"]) == (0, 0)
    assert (long["far_tiles_a_stream"], long["turns"]) == (12, 48)
    text = capsys.readouterr().out
    assert "open an issue in this project's repository" in text
    assert "enwik8, trained" in text


class TooLarge:
    """A model that does not fit, or does not fit at one setting."""

    def __init__(self, config: Any, mesh: Any):
        self.config, self.compile_seconds, self.compiled_bytes = config, 1.0, 2
        if config.model.layers == 24:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM\nmore")

    def measure(self, setting: str, seconds: float, show: Any) -> dict[str, Any]:
        if setting == "trained":
            raise jax.errors.JaxRuntimeError("INTERNAL: it broke")
        return {"ms": 20.0, "fastest_ms": 19.0, "slowest_ms": 21.0, "tokens_per_second": 1.0}


def test_failed_cases_are_reported_and_the_next_ones_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "Model", TooLarge)
    before = accelerator.environment()
    monkeypatch.setattr(accelerator, "environment", lambda: {**before, "device_kind": "TPU v5 lite"})
    output = tmp_path / "found.json"
    cases = accelerator.run(output, 1.0, tiny=False)
    assert json.loads(output.read_text())["cases"] == cases
    assert [case.get("error") for case in cases] == [
        None,
        "INTERNAL: it broke",
        None,
        *["not enough memory: RESOURCE_EXHAUSTED: Ran out of memory on HBM"] * 3,
    ]
    planned = {case["spans"]: case["planned"] for case in cases if case["config"] == "enwik8"}
    assert {row["topology"] for row in planned.values()} == {"v5e:2x4"}
    assert cases[0]["times_the_plan"] == pytest.approx(20 / float(planned["start"]["ms"]))
    assert "times_the_plan" not in cases[1]
    accelerator.show(cases, output)
    assert "failed" in capsys.readouterr().out


def test_what_is_done_stays_written_if_the_program_is_stopped(tmp_path, monkeypatch):
    class Stopped(TooLarge):
        def measure(self, setting: str, seconds: float, show: Any) -> dict[str, Any]:
            if setting == "trained":
                raise KeyboardInterrupt
            return super().measure(setting, seconds, show)

    monkeypatch.setattr(accelerator, "Model", Stopped)
    with pytest.raises(KeyboardInterrupt):
        accelerator.run(tmp_path / "found.json", 1.0, tiny=True)
    [case] = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert (case["spans"], case["ms"]) == ("start", 20.0)


@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        ("TPU v5 lite", "v5e:2x4"),
        ("TPU v6 lite", "v6e:2x4"),
        ("TPU v5", "v5p:2x2x2"),
        ("NVIDIA A100-SXM4-80GB", "a100:8"),
        ("NVIDIA H100 80GB HBM3", "h100:8"),
    ],
)
def test_chips_are_compared_with_their_own_plan(kind, topology):
    found = accelerator.planned("enwik8", "start", kind)
    assert found is not None
    assert (found["config"], found["topology"], found["spans"]) == ("enwik8", topology, "start")
    assert accelerator.planned("enwik8", "start", "NVIDIA L4") is None


def test_a_cpu_alone_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        accelerator.main([f"--output={tmp_path / 'found.json'}"])
    assert "--tiny" in capsys.readouterr().err
