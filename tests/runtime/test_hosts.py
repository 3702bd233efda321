"""Several processes: connecting, agreeing and exiting. tests/system/test_two_hosts.py trains with them."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import hosts
from adaptive_span_jax.runtime.signals import Interrupt

ROOT = Path(__file__).parents[2]

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
    assert hosts.is_multihost_environment(environment) == several


def test_open_mpi_that_does_not_name_its_head():
    with pytest.raises(UserError, match="--coordinator=HOST:PORT"):
        hosts.is_multihost_environment({"OMPI_COMM_WORLD_SIZE": "4"})


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


# What training does between steps, and nothing else; then something that takes for ever, like a save to a slow disk.
LOOP = """
import sys, time
import jax
from adaptive_span_jax.runtime import hosts
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.runtime.signals import Interrupt

hosts.DEAD_AFTER_SECONDS = 8
address, number, error = sys.argv[1], int(sys.argv[2]), sys.argv[3]
hosts.connect(address, 2, number)
with hosts.multihost_errors(), Interrupt(hosts.ProcessMax(sharding.make_mesh())) as interrupt:
    turn = 0
    while not interrupt.poll():
        turn += 1
        if turn == 10:
            print("turning", flush=True)
        if turn == 20 and number == 1 and error:
            raise eval(error)
        time.sleep(0.01)
    print("saving", turn, flush=True)
    time.sleep(1000)
"""


@contextlib.contextmanager
def looping(devices: int, error: str = "") -> Iterator[list[subprocess.Popen]]:
    """Two processes in LOOP; `error`: what is raised in the second. With one device each JAX computes at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    options: Any = {"cwd": ROOT, "env": os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}, "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", LOOP, address]
    parts = [subprocess.Popen([*command, str(number), error], **options) for number in range(2)]
    try:
        for part in parts:
            assert said(part) == "turning"
        yield parts
    finally:
        for part in parts:
            part.kill()
            part.communicate()


def said(part: subprocess.Popen) -> str:
    """What LOOP says next; the network library's threads print parts of lines before it and between."""
    assert part.stdout
    for line in part.stdout:
        if found := re.search(r"turning$|saving \d+$", line):
            return found.group()
    return ""


@pytest.mark.parametrize(
    ("which", "number", "devices"),
    [
        *((0, signal.SIGKILL, 2), (1, signal.SIGKILL, 1)),
        *(pytest.param(1, number, 2, marks=pytest.mark.slow) for number in (signal.SIGKILL, signal.SIGSTOP)),
    ],
)
def test_a_process_that_dies_or_falls_silent_ends_the_other(which, number, devices):
    with looping(devices) as parts:
        other = parts[1 - which]
        started = time.monotonic()
        parts[which].send_signal(number)
        _, errors = other.communicate(timeout=60)
        assert time.monotonic() - started < 8 + 10
        assert other.returncode in (2, -signal.SIGABRT)
        assert "another process ended" in errors or "another task died" in errors


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("hosts.UserError('a mistake')", "error in process 1 on {host}: a mistake\n"),
        ("OSError(28, 'No space left on device', 'log')", "error in process 1 on {host}: [Errno 28] No space left"),
        ("ZeroDivisionError('a bug')", "ZeroDivisionError: a bug\n"),
    ],
)
def test_an_error_in_one_process_ends_both(error, expected):
    with looping(1, error) as (first, second):
        started = time.monotonic()
        _, errors = second.communicate(timeout=60)
        assert time.monotonic() - started < 5, "it waited for the other, which waits for it"
        assert second.returncode == 2
        assert expected.format(host=socket.gethostname()) in errors
        assert ("Traceback" in errors) == ("bug" in error)
        _, errors = first.communicate(timeout=60)
        assert time.monotonic() - started < 8 + 10
        assert "another process ended" in errors or "another task died" in errors


def test_a_second_signal_ends_processes_at_once():
    with looping(2) as parts:
        for part in parts:
            part.send_signal(signal.SIGTERM)
        assert said(parts[0]) == said(parts[1]) != ""
        started = time.monotonic()
        for part, number in zip(parts, (signal.SIGINT, signal.SIGTERM), strict=True):
            part.send_signal(number)
        assert [part.wait(timeout=60) for part in parts] == [-signal.SIGINT, -signal.SIGTERM]
        assert time.monotonic() - started < 5
