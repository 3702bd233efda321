"""kill -9 at random moments, then the same command again: in the end the run is the one that was never killed.

Real processes, real files. The numbers that chance decides (how long a process lives) come from a fixed seed; the rest,
where in a step or save the kill falls, is up to the machine.
"""

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from adaptive_span_jax.checkpoint import sealing
from tests.support.kills import (
    BETWEEN_SAVES,
    ENDLESS,
    EPOCH,
    INTERVAL,
    WARMUP,
    Life,
    last_state,
)
from tests.support.results import without_times


def kill_and_compare(directory: Path, fields: dict[str, Any], kills: int, seed: int) -> list[int]:
    """Trains once undisturbed, once with kills, and compares the ends; the steps from which it was resumed."""
    chance, steps = random.Random(seed), 50 + 40 * kills
    cache, fields = directory / "jax", fields | {"train.steps": steps}
    undisturbed = Life(directory / "whole", cache, fields)
    assert undisturbed.end() == 0
    assert undisturbed.printed.count("is saved") >= steps // BETWEEN_SAVES

    workdir, checkpoints = directory / "killed", directory / "killed" / "checkpoints"
    reported, reached, half_written, starts, most = 0, 0, 0, [], 0
    for number in range(kills):
        life = Life(workdir, cache, fields)
        if number % 5 == 4:
            time.sleep(chance.uniform(0, 4))  # anywhere, also while it starts
        else:
            life.wait_for("is saved", chance.randint(1, 2))
            if number % 2 == 0:
                while life.process.poll() is None and not sealing.leftovers(checkpoints):
                    time.sleep(0.001)  # a save begins
            time.sleep(chance.uniform(0, 0.05))
        code = life.end(signal.SIGKILL)
        assert code == -signal.SIGKILL, f"ended by itself with {code}: {life.printed}"
        half_written += len(sealing.leftovers(checkpoints))
        most = max(most, len(list(checkpoints.iterdir())) if checkpoints.is_dir() else 0)
        _check_start(life, reported, reached)
        starts += [life.started_at] if life.started_at else []
        reported, reached = max(reported, life.reported), max(reached, life.reached)

    last = Life(workdir, cache, fields)
    assert last.end() == 0, last.printed
    _check_start(last, reported, reached)
    starts.append(last.started_at)
    assert half_written, "no kill fell into a save"
    assert not sealing.leftovers(checkpoints)
    assert not (checkpoints / sealing.DAMAGED).exists(), "nothing that was saved is damaged"
    # However often it was killed: the two kept, one more before thinning or being deleted, one being written.
    assert most <= 4

    (arrays, about), (killed_arrays, killed_about) = (
        last_state(directory / name, steps) for name in ("whole", "killed")
    )
    assert about == killed_about
    assert about["position"]["epoch"] >= steps // EPOCH
    jax.tree.map(assert_array_equal, arrays, killed_arrays)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays))
    results = [json.loads((directory / name / "result.json").read_text()) for name in ("whole", "killed")]
    assert without_times(results[0]) == without_times(results[1])
    logs = [(directory / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    bits = [
        [(line["step"], line["train_bits"]) for line in map(json.loads, log) if "train_bits" in line] for log in logs
    ]
    assert bits[0] == bits[1]
    return starts


def _check_start(life: Life, reported: int, reached: int) -> None:
    """Nothing reported as saved is lost; at most an interval is repeated."""
    if life.started_at is None:
        return  # killed before it got so far
    assert life.started_at >= reported
    assert reached - life.started_at <= INTERVAL
    if life.started_at:
        assert life.started_at % BETWEEN_SAVES == 0


def test_a_run_that_is_killed_is_the_run_that_never_was(tmp_path):
    kill_and_compare(tmp_path, {"model.attention": "plain"}, kills=1, seed=1)  # plain is compiled sooner


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fixed", "adaptive", "dynamic"])
def test_seven_kills(tmp_path, kind):
    starts = kill_and_compare(tmp_path, {"span.kind": kind}, kills=7, seed=7)
    assert starts[0] < WARMUP
    assert starts[-1] > EPOCH
    assert len(set(starts)) > 3, starts


@pytest.mark.slow
def test_sigterm_saves_and_ends_in_order(tmp_path):
    life = Life(tmp_path / "run", tmp_path / "jax", ENDLESS)
    life.wait_for("step 20/", 1)
    started = time.monotonic()
    assert life.end(signal.SIGTERM) == 0
    assert time.monotonic() - started < 60
    assert f"Stopped. Step {life.reported:,} is saved" in life.printed
    assert life.reported >= 20
    assert sealing.sealed_steps(tmp_path / "run" / "checkpoints")[-1] == life.reported


# main.py on a disk that takes for ever to write what comes after step 20.
SLOW_DISK = """
import runpy, time
from adaptive_span_jax.checkpoint import sealing as sealed

def slow(directory, step, seal=sealed.seal):
    if step > 20:
        time.sleep(1000)
    seal(directory, step)

sealed.seal = slow
runpy.run_path("main.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once_and_costs_no_checkpoint(tmp_path):
    life = Life(tmp_path / "run", tmp_path / "jax", ENDLESS, SLOW_DISK)
    life.wait_for("is saved", 2)
    life.process.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert life.process.poll() is None, "it is saving"
    started = time.monotonic()
    assert life.end(signal.SIGTERM) == -signal.SIGTERM
    assert time.monotonic() - started < 5
    folder = tmp_path / "run" / "checkpoints"
    assert sealing.sealed_steps(folder)[-1] == life.reported == 20
    assert sealing.find_damage(folder / "20") is None
