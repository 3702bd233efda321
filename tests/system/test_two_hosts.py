"""One run on two hosts: prepared by the first, killed, stopped, resumed on one host and on two, and like one alone.

Two processes on this machine play the hosts. They are told of each other in every way there is: by flags, Slurm and
Open MPI.
"""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

from adaptive_span_jax.checkpoint import sealing
from tests.support.published_texts import enwik8_text, source_of, zipped

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 600
DEAD_AFTER_SECONDS = 20

# float64, so that the order in which processes add up cannot hide a difference.
FIELDS = [
    f"--config.{field}"
    for field in (
        *("model.layers=2", "model.width=16", "model.heads=2", "model.feedforward=24", "model.attention=plain"),
        *("model.dropout=0.2", "model.compute_dtype=float64", "span.limit=32", "span.ramp=8", "mesh.fsdp=2"),
        *("train.batch_size=4", "train.segment=16", "data.source=enwik8", "data.max_bytes=0", "log.every_steps=1"),
        *("checkpoint.every_steps=6", "evaluate.every_steps=1000000", "evaluate.batch_size=4"),
    )
]

# main.py with a small enwik8 and without pictures. Who prepares the data says so, and the first host comes late to it.
MAIN = f"""
import runpy, sys, time
import jax
from adaptive_span_jax.data import corpus
from adaptive_span_jax.runtime import hosts
from adaptive_span_jax.training import metrics
from adaptive_span_jax.report import report
from adaptive_span_jax.data.tfds import prepared
from adaptive_span_jax.data.tfds.enwik8 import Enwik8
from adaptive_span_jax.data.tfds.source import Source

def late(data, prepare=corpus.prepare):
    time.sleep(2)
    prepare(data)

def build(*arguments, build=prepared._build):
    print("prepares the data", file=sys.stderr)
    build(*arguments)

hosts.DEAD_AFTER_SECONDS = {DEAD_AFTER_SECONDS}
Enwik8.SOURCE = {source_of("enwik8", enwik8_text())!r}
corpus.prepare, prepared._build = late, build
metrics.MetricsLog.write_spans = report.write_report = lambda *_: None
runpy.run_path("main.py", run_name="__main__")
"""


def by_flags(port: int, count: int, number: int) -> tuple[list[str], dict[str, str]]:
    return [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={number}"], {}


def by_slurm(port: int, count: int, number: int) -> tuple[list[str], dict[str, str]]:
    return [], {
        "SLURM_JOB_ID": str(port - 2**16 + 2**12),  # from which JAX makes the port
        "SLURM_STEP_NODELIST": "127.0.0.1,elsewhere",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": "0",
    }


def by_open_mpi(port: int, count: int, number: int) -> tuple[list[str], dict[str, str]]:
    return [], {
        "OMPI_MCA_orte_hnp_uri": f"{(port - 2**16 + 2**12) * 2**12}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(number),
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }


def free_port() -> int:
    """One of those that JAX chooses from for Slurm and Open MPI."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.randrange(2**16 - 2**12, 2**16)))
            except OSError:
                continue
            return probe.getsockname()[1]


class Run:
    """The processes of one run, two CPU devices each."""

    def __init__(self, workdir: Path, *arguments: str, data: list[Path], tell=by_flags):
        """`data`: the folder of prepared data of each process."""
        self.workdir, self.parts, port = workdir, [], free_port()
        for number, folder in enumerate(data):
            flags, environment = tell(port, len(data), number)
            fields = [*FIELDS, f"--config.data.directory={folder}", f"--config.data.archive={folder.parent}/enwik8.zip"]
            command = [sys.executable, "-c", MAIN, *fields, f"--workdir={workdir}", *arguments, *flags]
            environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"} | environment
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            self.parts.append(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes))

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            part.kill()
            part.communicate()

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while max(losses(self.workdir), default=0) < step:
            assert time.monotonic() < deadline, "too slow"
            for part in self.parts:
                assert part.poll() is None, part.communicate()
            time.sleep(0.1)

    def finish(self) -> tuple[list[int], list[str], list[str]]:
        """Exit code, output and errors of each."""
        texts = [part.communicate(timeout=PATIENCE_SECONDS) for part in self.parts]
        # Looked through for words of ours only: the network library's threads print parts of lines in between.
        return [part.returncode for part in self.parts], [out for out, _ in texts], [errors for _, errors in texts]


def losses(workdir: Path) -> dict[int, float]:
    """The logged loss of every step."""
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line["train_bits"] for line in found if "train_bits" in line}


def stop(run: Run, step: int, number: int) -> tuple[list[int], list[str], list[str]]:
    """Sends a signal to the last process, which prints nothing, after a step."""
    run.wait_for_step(step)
    run.parts[-1].send_signal(number)
    return run.finish()


ENDLESS = "--config.train.steps=1000000"


@pytest.fixture
def data(tmp_path) -> Path:
    """A folder for prepared data, beside the archive from which it is prepared."""
    (tmp_path / "enwik8.zip").write_bytes(zipped("enwik8", enwik8_text()))
    return tmp_path / "data"


def check_like_one(workdir: Path, data: Path, steps: int) -> None:
    """A finished run of two hosts, all of it beside one host's."""
    alone = workdir.with_name("alone")
    with Run(alone, f"--config.train.steps={steps}", data=[data]) as one:
        codes, _, errors = one.finish()
    assert codes == [0], errors
    found, expected = losses(workdir), losses(alone)
    assert sorted(found) == sorted(expected) == list(range(1, steps + 1))
    assert_allclose([found[step] for step in expected], [*expected.values()], rtol=1e-9)
    results = [json.loads((directory / "result.json").read_text()) for directory in (alone, workdir)]
    assert_allclose(results[0]["test_bits"], results[1]["test_bits"], rtol=1e-9)


def test_two_hosts_that_are_killed_and_resumed_train_like_one(tmp_path, data):
    workdir = tmp_path / "two"
    with Run(workdir, ENDLESS, data=[data, data]) as both:
        both.wait_for_step(12)
        for part in both.parts:
            part.kill()
    with Run(workdir, "--config.train.steps=20", data=[data, data]) as both:
        codes, printed, errors = both.finish()
    assert codes == [0, 0], errors
    assert re.search(r"from step (5|1[05])\b", printed[0]), printed[0]
    assert "step" not in printed[1]
    check_like_one(workdir, data, 20)


@pytest.mark.slow
def test_a_run_on_two_hosts_is_the_run_on_one(tmp_path, data):
    workdir = tmp_path / "two"

    # The first prepares the data for both. The second is killed: the first says so and ends, too.
    with Run(workdir, ENDLESS, data=[data, data]) as both:
        both.wait_for_step(12)
        killed_at = time.monotonic()
        both.parts[1].kill()
        codes, _, errors = both.finish()
    assert codes[0] not in (0, None)
    assert "another process ended" in errors[0] or "another task died" in errors[0]
    assert time.monotonic() - killed_at < DEAD_AFTER_SECONDS + 30
    assert ["prepares the data" in text for text in errors] == [True, False]

    # A folder that the first does not see is prepared by the second. A signal to the one that prints nothing ends both.
    with Run(workdir, ENDLESS, data=[data, tmp_path / "own"], tell=by_slurm) as both:
        codes, printed, errors = stop(both, 25, signal.SIGTERM)
    stopped = sealing.sealed_steps(workdir / "checkpoints")[-1]
    assert codes == [0, 0], errors
    assert ["prepares the data" in text for text in errors] == [False, True]
    assert re.search(r"from step (5|1[05])\b", printed[0]), printed[0]
    assert f"Stopped. Step {stopped} is saved" in printed[0]
    assert "; to resume: the same command again, on every host\n" in printed[0]
    assert "step" not in printed[1]

    # On to one host with half the devices.
    with Run(workdir, ENDLESS, data=[data]) as one:
        codes, printed, errors = stop(one, stopped + 4, signal.SIGINT)
    assert codes == [130], errors
    assert re.search(rf"from step {stopped}\b", printed[0]), printed[0]
    stopped = sealing.sealed_steps(workdir / "checkpoints")[-1]

    # Back to two, to the end; and all of it on one.
    steps = f"--config.train.steps={stopped + 5}"
    with Run(workdir, steps, data=[data, data], tell=by_open_mpi) as both:
        codes, printed, errors = both.finish()
    assert codes == [0, 0], errors
    assert re.search(rf"from step {stopped}\b", printed[0]), printed[0]
    assert "4 × cpu (cpu), mesh {'data': 2, 'fsdp': 2}, 2 processes" in printed[0]
    assert "Result" in printed[0]
    assert "step" not in printed[1]
    check_like_one(workdir, data, stopped + 5)
    assert len(list((workdir / "tensorboard").iterdir())) == 4, "one for each start, by process 0 alone"
