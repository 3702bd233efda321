"""Several processes as one run: how they find each other, agree, die and go on."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from numpy.testing import assert_allclose

from adaptive_span_jax import hosts
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.interrupt import Interrupt

ROOT = Path(__file__).parents[1]
PATIENCE_SECONDS = 600

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911"}
TPU = {"TPU_ML_PLATFORM": "JAX"}


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}, False),
        (SLURM, True),
        (SLURM | {"SLURM_NTASKS": "1"}, False),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, False),  # sbatch without srun
        (MPI, True),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, False),
        (TPU, True),  # its metadata will tell how many
        (TPU | {"TPU_SKIP_MDS_QUERY": "1"}, False),
        (TPU | {"JAX_PLATFORMS": "cpu"}, False),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a"}, False),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True),
    ],
)
def test_the_environment_tells_whether_there_are_others(environment, several):
    assert hosts.started_together(environment) == several


def test_open_mpi_that_does_not_name_its_head():
    with pytest.raises(UserError, match="--coordinator=HOST:PORT"):
        hosts.started_together({"OMPI_COMM_WORLD_SIZE": "4"})


def test_half_an_address():
    with pytest.raises(UserError, match="must be given together"):
        hosts.connect("127.0.0.1:1234", 2, None)


def test_one_process_asks_nobody(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("asked"))
    hosts.connect(None, None, None)
    hosts.connect("127.0.0.1:1234", 1, 0)
    assert not jax.distributed.is_initialized()


def test_a_signal_is_acted_on_only_once_agreed():
    answers = iter([0, 0, signal.SIGTERM])
    said = []
    with Interrupt(lambda noted: said.append(noted) or next(answers)) as interrupt:
        assert not interrupt.poll()
        os.kill(os.getpid(), signal.SIGINT)
        assert not interrupt.poll()
        assert interrupt.signal is None
        assert interrupt.poll()
        assert interrupt.poll()
    assert said == [0, signal.SIGINT, signal.SIGINT]
    assert interrupt.exit_code == 0


class Processes:
    """The processes of one run, all on this machine, two CPU devices each."""

    def __init__(self, count: int, workdir: Path, *arguments: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(4 // count), "JAX_PLATFORMS": "cpu"}
        self.parts = []
        for number in range(count):
            flags = (f"--coordinator={address}", f"--num_processes={count}", f"--process_id={number}")
            self.parts.append(
                subprocess.Popen(
                    [sys.executable, "main.py", *FIELDS, f"--workdir={workdir}", *arguments, *flags],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        self.workdir = workdir

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            part.kill()
            part.communicate()

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while last_step(self.workdir) < step:
            assert time.monotonic() < deadline, "too slow"
            for part in self.parts:
                assert part.poll() is None, part.communicate()
            time.sleep(0.1)

    def finish(self) -> list[tuple[int, str, str]]:
        """Exit code, output and errors of each."""
        ended = [part.communicate(timeout=PATIENCE_SECONDS) for part in self.parts]
        return [(part.returncode, *texts) for part, texts in zip(self.parts, ended, strict=True)]


# float64, so that the order in which processes add up cannot hide a difference.
FIELDS = [
    f"--config.{field}"
    for field in (
        *("model.layers=2", "model.width=16", "model.heads=2", "model.feedforward=24", "model.attention=plain"),
        *("model.dropout=0.2", "model.compute_dtype=float64", "span.limit=32", "span.ramp=8", "mesh.fsdp=2"),
        *("train.batch_size=4", "train.segment=16", "data.max_bytes=20000", "log.every_steps=1"),
        *("checkpoint.every_steps=5", "evaluate.every_steps=1000000", "evaluate.streams=4"),
    )
]


def losses(workdir: Path) -> dict[int, float]:
    """The logged loss of every step."""
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["step"]: line["train_bits"] for line in found if "train_bits" in line}


def last_step(workdir: Path) -> int:
    return max(losses(workdir), default=0)


@pytest.mark.slow
def test_two_processes_die_stop_resume_and_match_one(tmp_path):
    workdir = tmp_path / "two"
    endless = "--config.train.steps=1000000"

    # One is killed: the other says so and ends, too.
    with Processes(2, workdir, endless) as both:
        both.wait_for_step(12)
        killed_at = time.monotonic()
        both.parts[1].kill()
        (code, _, errors), _ = both.finish()
    assert code not in (0, None)
    assert "another process has ended" in errors or "another task died" in errors
    assert time.monotonic() - killed_at < hosts.DEAD_AFTER_SECONDS + 30

    # A signal to the one that writes nothing stops both after the same step.
    with Processes(2, workdir, endless) as both:
        both.wait_for_step(25)
        both.parts[1].send_signal(signal.SIGTERM)
        (code, printed, errors), (other_code, other_printed, _) = both.finish()
    assert (code, other_code) == (0, 0), errors
    assert "Stopped. Step" in printed
    assert "from step" in printed
    assert "tep" not in other_printed
    stopped = max(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())

    # To the end, and the same with one process.
    steps = f"--config.train.steps={stopped + 5}"
    with Processes(2, workdir, steps) as both:
        (code, printed, errors), _ = both.finish()
    assert code == 0, errors
    assert f"from step {stopped:,}" in printed
    assert "Result" in printed
    with Processes(1, tmp_path / "one", steps) as one:
        ((code, _, errors),) = one.finish()
    assert code == 0, errors
    found, expected = losses(workdir), losses(tmp_path / "one")
    both_logged = sorted(found.keys() & expected.keys())
    assert len(both_logged) == stopped + 3, "only the last step before each stop is not logged"
    assert_allclose([found[step] for step in both_logged], [expected[step] for step in both_logged], rtol=1e-9)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two")]
    assert_allclose(results[0]["test_bits"], results[1]["test_bits"], rtol=1e-9)
    assert len(list((workdir / "tensorboard").iterdir())) == 3, "only process 0 writes"
