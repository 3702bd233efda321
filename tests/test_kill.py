"""kill -9 at random moments, then the same command again: in the end the run is the one that was never killed.

Real processes, real files. The numbers that chance decides (how long a process lives) come from a fixed seed; the rest,
where in a step or save the kill falls, is up to the machine.
"""

import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from adaptive_span_jax import sealed

ROOT = Path(__file__).parents[1]
INTERVAL, WARMUP, EPOCH = 12, 60, 42
BETWEEN_SAVES = 10  # four fifths of an interval

ENDLESS = {"train.steps": 100_000}

# Two streams of a little text, an epoch of which has at most EPOCH steps. Dropout on. Spans that move.
FIELDS = {
    "model.layers": 2,
    "model.width": 16,
    "model.heads": 2,
    "model.feedforward": 16,
    "model.dropout": 0.2,
    "span.limit": 24,
    "span.ramp": 4,
    "span.penalty": 1e-3,
    "train.batch_size": 2,
    "train.segment": 8,
    "train.warmup_steps": WARMUP,
    "data.max_bytes": 750,
    "evaluate.streams": 2,
    "evaluate.every_steps": 10_000,
    "checkpoint.every_steps": INTERVAL,
    "log.every_steps": 1,
}


# main.py without pictures, which take longer than all the rest of so small a run.
NO_PICTURES = """
import runpy
from adaptive_span_jax import metrics, report

metrics.MetricsLog.write_spans = report.write_report = lambda *_: None
runpy.run_path("main.py", run_name="__main__")
"""


class Life:
    """One process of a run, from its start to its end."""

    def __init__(self, workdir: Path, cache: Path, fields: dict[str, Any], program: str = NO_PICTURES):
        command = [
            sys.executable,
            "-c",
            program,
            f"--workdir={workdir}",
            *(f"--config.{k}={v}" for k, v in (FIELDS | fields).items()),
        ]
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.printed = ""
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.printed += line
            self._lines.put(line)

    def wait_for(self, text: str, times: int) -> None:
        """Returns when so many lines with a text have been printed, or the process has ended."""
        seen = self.printed.count(text)
        while seen < times and self.process.poll() is None:
            try:
                seen += text in self._lines.get(timeout=0.05)
            except queue.Empty:
                continue

    def end(self, number: signal.Signals | None = None) -> int:
        """Sends a signal, waits for the end, answers the exit code."""
        if number is not None:
            self.process.send_signal(number)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout
        self.process.stdout.close()
        assert "Traceback" not in self.printed, self.printed
        return self.process.returncode

    @property
    def started_at(self) -> int | None:
        if "from the beginning" in self.printed:
            return 0
        found = re.search(r"from step ([\d,]+)", self.printed)
        return int(found[1].replace(",", "")) if found else None

    @property
    def reported(self) -> int:
        """The last step that was reported as saved."""
        return max(map(_number, re.findall(r"^step ([\d,]+) is saved", self.printed, re.MULTILINE)), default=0)

    @property
    def reached(self) -> int:
        """The last step that was shown."""
        return max(map(_number, re.findall(r"^step ([\d,]+)/", self.printed, re.MULTILINE)), default=0)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def last_state(workdir: Path, step: int) -> tuple[Any, Any]:
    """All arrays of a checkpoint, and what decides how training goes on."""
    from orbax.checkpoint import v1 as ocp

    folder = workdir / "checkpoints" / str(step)
    assert sealed.find_damage(folder) is None
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes: Any = ocp.checkpointables_metadata(str(folder)).metadata
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), dict(shapes))
    about = json.loads((folder / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    return ocp.load_checkpointables(str(folder), abstract), {key: about[key] for key in ("position", "learning_rate")}


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
                while life.process.poll() is None and not sealed.leftovers(checkpoints):
                    time.sleep(0.001)  # a save begins
            time.sleep(chance.uniform(0, 0.05))
        code = life.end(signal.SIGKILL)
        assert code == -signal.SIGKILL, f"ended by itself with {code}: {life.printed}"
        half_written += len(sealed.leftovers(checkpoints))
        most = max(most, len(list(checkpoints.iterdir())) if checkpoints.is_dir() else 0)
        _check_start(life, reported, reached)
        starts += [life.started_at] if life.started_at else []
        reported, reached = max(reported, life.reported), max(reached, life.reached)

    last = Life(workdir, cache, fields)
    assert last.end() == 0, last.printed
    _check_start(last, reported, reached)
    starts.append(last.started_at)
    assert half_written, "no kill fell into a save"
    assert not sealed.leftovers(checkpoints)
    assert not (checkpoints / sealed.DAMAGED).exists(), "nothing that was saved is damaged"
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
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}
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
    assert sealed.sealed_steps(tmp_path / "run" / "checkpoints")[-1] == life.reported


# main.py on a disk that takes for ever to write what comes after step 20.
SLOW_DISK = """
import runpy, time
from adaptive_span_jax import sealed

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
    assert sealed.sealed_steps(folder)[-1] == life.reported == 20
    assert sealed.find_damage(folder / "20") is None
