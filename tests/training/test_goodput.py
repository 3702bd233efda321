"""The share of a run's time in steps that counted: alone, over a whole run, and over runs that were killed."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.commands import train
from adaptive_span_jax.training import goodput
from adaptive_span_jax.training.goodput import Goodput
from adaptive_span_jax.training.metrics import MetricsLog, read_lines
from tests.conftest import tiny_config

QUICK: dict[str, Any] = {"attention": "plain", "layers": 1}  # to compile


def logged(workdir: Path) -> list[dict[str, Any]]:
    return read_lines(workdir / "metrics.jsonl")


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(goodput, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_only_steps_that_counted_are_counted(monkeypatch):
    clock = Clock(monkeypatch)
    found = Goodput(program_started=90.0)  # imported JAX and read the text
    clock.wait(5)  # compiled
    found.end_step(good=True)
    assert found.productive_seconds == 0
    clock.wait(2)
    found.end_step(good=True)
    with found.paused():
        clock.wait(4)  # evaluated
    with found.paused():
        clock.wait(1)  # waited for a save
    clock.wait(3)
    found.end_step(good=True)
    clock.wait(1)
    found.end_step(good=False)
    clock.wait(4)
    found.end_step(good=True)
    assert (found.productive_seconds, found.wall_seconds) == (9, 30)
    assert found.share == 0.3


def test_a_resumed_run_goes_on_from_the_time_before(monkeypatch):
    clock = Clock(monkeypatch)
    found = Goodput(program_started=98.0, wall_before=50.0, productive_before=30.0)
    assert (found.productive_seconds, found.wall_seconds) == (30, 52)
    clock.wait(1)
    found.end_step(good=True)
    clock.wait(7)
    found.end_step(good=True)
    assert (found.productive_seconds, found.wall_seconds) == (37, 60)


def test_the_log_remembers_the_time_of_lines_that_are_removed(tmp_path):
    log = MetricsLog(tmp_path, resumed_at=0)
    assert log.wall_seconds == 0
    for step in (5, 10, 15):
        log.write(step, {"wall_seconds": 10.0 + step, "train_bits": 2.0})
    log.close()
    for _ in range(2):  # the first of them is killed before it has logged anything
        log = MetricsLog(tmp_path, resumed_at=10)
        assert log.wall_seconds == 25
        log.close()
        assert [line["step"] for line in logged(tmp_path) if "train_bits" in line] == [5, 10]


@pytest.mark.usefixtures("one_device", "no_report")
def test_evaluating_saving_and_waiting_for_saves_do_not_count(tmp_path, monkeypatch):
    def slowly(function):
        return lambda *arguments: (time.sleep(0.4), function(*arguments))[1]

    monkeypatch.setattr(train, "_evaluate_dev", slowly(train._evaluate_dev))
    for name in ("save", "wait_if_overdue"):
        monkeypatch.setattr(Checkpoints, name, slowly(getattr(Checkpoints, name)))
    config = tiny_config(train={"steps": 6}, model=QUICK, evaluate={"every_steps": 1})
    assert train.train(config, tmp_path, "command") == 0
    saved = Checkpoints(tmp_path / "checkpoints", config.checkpoint).describe(6)
    # Six steps of milliseconds, each with a wait, an evaluation and a save; of each kind, five are before a step.
    assert 0 < saved.productive_seconds < 1.5
    assert saved.wall_seconds > 3 * 5 * 0.4


@pytest.mark.usefixtures("one_device", "no_report")
def test_steps_lost_by_a_kill_do_not_count_but_their_time_does(tmp_path, capsys):
    fields: Any = {"model": QUICK, "log": {"every_steps": 1}, "evaluate": {"every_steps": 2}}
    config = tiny_config(train={"steps": 4}, **fields)
    assert train.train(config, tmp_path, "command") == 0
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if it had been killed before that save
    checkpoints = Checkpoints(tmp_path / "checkpoints", config.checkpoint)
    before, lost = checkpoints.describe(2), max(line.get("wall_seconds", 0) for line in logged(tmp_path))
    assert lost > before.wall_seconds
    capsys.readouterr()

    longer = tiny_config(train={"steps": 8}, **fields)
    began = time.perf_counter()
    assert train.train(longer, tmp_path, "command") == 0
    took = time.perf_counter() - began
    # The first step of a process does not count.
    started, first = (line for line in logged(tmp_path) if line["step"] == 3)
    assert first["wall_seconds"] > lost + started["startup_seconds"]
    assert first["goodput"] * first["wall_seconds"] == pytest.approx(before.productive_seconds, rel=1e-3)
    after = checkpoints.describe(8)
    assert lost < after.wall_seconds < lost + took
    assert before.productive_seconds < after.productive_seconds < before.productive_seconds + took

    result = json.loads((tmp_path / "result.json").read_text())
    assert after.wall_seconds < result["wall_seconds"] < lost + took
    assert result["goodput"] == pytest.approx(after.productive_seconds / result["wall_seconds"])
    printed = capsys.readouterr().out
    assert f"{100 * result['goodput']:.1f} % of " in printed
    lines = logged(tmp_path)
    steps = [line for line in lines if "goodput" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(0 <= line["goodput"] < 1 for line in steps)
    # The peak of a CPU is unknown.
    assert not {"mfu", "flops_utilisation"} & {name for line in lines for name in line}
    assert "mfu" not in result
    assert "MFU" not in printed
