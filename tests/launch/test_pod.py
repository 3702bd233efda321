"""The container's entry point: a pod exits with the code that its Job needs."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch_stand_ins import LAUNCH


def start_pod(directory: Path, body: str) -> subprocess.Popen:
    """The container's entry point in a copy of its own, with a main.py of a few lines."""
    place = directory / "launch" / "kubernetes"
    place.mkdir(parents=True)
    shutil.copy(LAUNCH / "kubernetes" / "entrypoint.sh", place)
    (directory / "main.py").write_text(body)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", str(place / "entrypoint.sh"), "a b"],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_pod_ends_as_training_does(tmp_path, code):
    pod = start_pod(tmp_path, f"import sys; print(sys.argv[1:]); sys.exit({code})")
    assert pod.communicate(timeout=120)[0] == "['a b']\n"
    assert pod.returncode == code


def test_a_pod_that_is_told_to_stop_lets_training_save_and_does_not_count_as_complete(tmp_path):
    saves = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("saved", flush=True), sys.exit(0)))
        print("ready", flush=True)
        time.sleep(60)
    """
    pod = start_pod(tmp_path, "\n".join(line.strip() for line in saves.splitlines()))
    assert pod.stdout is not None
    assert pod.stdout.readline() == "ready\n"
    time.sleep(0.1)
    pod.send_signal(signal.SIGTERM)
    assert pod.communicate(timeout=120)[0] == "saved\n"
    assert pod.returncode == 143
