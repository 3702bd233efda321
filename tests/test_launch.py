"""The launch scripts, with stand-ins for gcloud, kubectl, sbatch and the rest that record what they are called with."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / ".ci" / "run"])

SLICE = ["--name=span", "--zone=us-west4-a"]
TRAIN = ["--", "--config=configs/enwik8_large.py"]
ODD = "--workdir=/a b&c\"'$(touch oops);*"  # all that an unquoted variable would trip over

# Answers come from files beside the stand-in, one line a call: a state to print, an exit code, or `run` to do as told.
STAND_IN = """#!{python} -S
import json, subprocess, sys
from pathlib import Path
here, name, words = Path({here!r}), {name!r}, sys.argv[1:]
if name == "kubectl" and "apply" in words:
    words.append(sys.stdin.read())
with open(here / "calls", "a") as file:
    file.write(json.dumps([name, *words]) + "\\n")
answers = here / next((word for word in ("describe", "ssh") if word in words), name)
if answers.exists():
    answer, *rest = answers.read_text().splitlines() or ["0"]
    answers.write_text("\\n".join(rest))
    if answer == "run":
        command = next(word for word in words if word.startswith("--command=")).partition("=")[2]
        sys.exit(subprocess.run(["bash", "-c", command], cwd=here / "home").returncode)
    if answer.isdigit():
        sys.exit(int(answer))
    print(answer)
"""


class StandIns:
    """Programs that record their arguments."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.programs = directory / "programs"
        self.programs.mkdir()
        (directory / "home").mkdir()
        for name in ("gcloud", "kubectl", "sbatch", "srun", "scontrol", "nvidia-smi"):
            (self.programs / name).write_text(STAND_IN.format(python=sys.executable, here=str(directory), name=name))
            (self.programs / name).chmod(0o755)

    def answer(self, what: str, *lines: str | int) -> None:
        """What the next calls of `what` (describe, ssh or a program's name) answer."""
        (self.directory / what).write_text("\n".join(map(str, lines)))

    def calls(self) -> list[list[str]]:
        """Every call so far: the program's name and its arguments."""
        file = self.directory / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def run(self, script: str | Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """A launch script, started where the stand-ins come first."""
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(LAUNCH / script), *arguments],
            env={**os.environ, "PATH": path, "POLL_SECONDS": "0", "TMPDIR": str(self.directory), **environment},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture
def stand_ins(tmp_path):
    return StandIns(tmp_path)


def test_shellcheck_finds_nothing():
    program = shutil.which("shellcheck", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs shellcheck: pip install -r requirements-dev.txt")
    found = subprocess.run([program, "-x", *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        ("tpu_vm.sh", [], "no command"),
        ("tpu_vm.sh", ["fly", *SLICE], "unknown command fly"),
        ("tpu_vm.sh", ["create"], "--name is missing"),
        ("tpu_vm.sh", ["create", "--name=span"], "--zone is missing"),
        ("tpu_vm.sh", ["create", "--name=", "--zone=z"], "unknown argument --name="),
        ("tpu_vm.sh", ["start", *SLICE], "no --config=… after --"),
        ("tpu_vm.sh", ["run", *SLICE, "--spot", *TRAIN], "a --spot slice loses its disk"),
        ("gpu_host.sh", [], "--config=… is missing"),
        ("slurm.sbatch", [], "--nodes=N is missing"),
        ("slurm.sbatch", ["--nodes=two", *TRAIN], "--nodes=N is missing or no number"),
        ("slurm.sbatch", ["--nodes=2"], "no --config=… after --"),
        ("slurm.sbatch", ["--nodes=2", *TRAIN], "no --workdir=/… after --"),
        ("kubernetes.sh", [], "--name is missing or malformed"),
        ("kubernetes.sh", ["start", "--name=Span"], "--name is missing or malformed: 'Span'"),
        ("kubernetes.sh", ["start", "--name=span"], "--image is missing"),
        ("kubernetes.sh", ["start", "--name=span", "--image=a\nb: c"], "--image is missing or malformed"),
        ("kubernetes.sh", ["start", "--name=span", "--image=a", "--machine=cpu"], "--machine is missing or malformed"),
        ("kubernetes.sh", ["fly", "--name=span"], "unknown command fly"),
    ],
)
def test_missing_arguments_are_refused_with_the_usage(stand_ins, script, arguments, reason):
    found = stand_ins.run(script, *arguments)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith(f"error: {reason}")
    assert f"usage: launch/{script}" in found.stderr
    assert not stand_ins.calls()


def commands(output: str) -> list[list[str]]:
    """The commands of a dry run, as a shell would split them. (A word in $'…' is left as it is.)"""
    lines = [line for line in output.splitlines() if not line.startswith("#")]
    return [shlex.split(line) for line in lines if "$'" not in line]


@pytest.mark.parametrize("command", ["run", "create", "install", "start", "logs", "delete"])
def test_dry_run_of_a_tpu_slice_touches_nothing(stand_ins, command):
    found = stand_ins.run("tpu_vm.sh", command, *SLICE, "--project=p", "--dry-run", *TRAIN)
    assert found.returncode == 0, found.stderr
    assert not stand_ins.calls()
    assert sorted(path.name for path in stand_ins.directory.iterdir()) == ["home", "programs"]
    assert "--zone=us-west4-a --project=p" in found.stdout


def test_dry_run_prints_what_a_run_does(stand_ins):
    arguments = ("--spot", *TRAIN, "--workdir=/mnt/run")
    shown = commands(stand_ins.run("tpu_vm.sh", "create", *SLICE, "--dry-run", *arguments).stdout)
    stand_ins.answer("describe", 1, "WAITING_FOR_RESOURCES", "ACTIVE")
    assert stand_ins.run("tpu_vm.sh", "create", *SLICE, *arguments).returncode == 0
    done = [call for number, call in enumerate(stand_ins.calls()) if number in (1, 2)]
    assert done == shown
    assert done[0] == [
        *["gcloud", "compute", "tpus", "queued-resources", "create", "span", "--zone=us-west4-a", "--node-id=span"],
        *["--accelerator-type=v5litepod-8", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"],
    ]


def verbs(calls: list[list[str]]) -> list[str]:
    """What was asked of gcloud, describe left out."""
    known = ("create", "delete", "scp", "ssh")
    return [word for call in calls for word in call if word in known]


def test_a_preempted_slice_is_asked_for_again(stand_ins):
    # Not there, then there; training breaks off with the connection, and the slice is gone; all again, to the end.
    stand_ins.answer("describe", 1, "ACTIVE", "SUSPENDED", 1, "PROVISIONING", "ACTIVE", "ACTIVE")
    stand_ins.answer("ssh", 0, 0, 255, 0, 0, 0)
    found = stand_ins.run("tpu_vm.sh", "run", *SLICE, "--spot", *TRAIN, "--workdir=/mnt/run")
    assert found.returncode == 0, found.stderr
    once = ["create", "scp", "ssh", "ssh", "ssh"]
    assert verbs(stand_ins.calls()) == [*once, "delete", *once]
    assert "To stop paying: launch/tpu_vm.sh delete --name=span --zone=us-west4-a" in found.stderr


def test_a_slice_that_was_taken_before_the_start_is_asked_for_again(stand_ins):
    stand_ins.answer("describe", "SUSPENDED", "SUSPENDED", 1, "ACTIVE", "ACTIVE")
    stand_ins.answer("ssh", 0, 0, 0)
    assert stand_ins.run("tpu_vm.sh", "run", *SLICE, *TRAIN).returncode == 0
    assert verbs(stand_ins.calls()) == ["delete", "create", "scp", "ssh", "ssh", "ssh"]


def test_a_lost_connection_is_no_end(stand_ins):
    stand_ins.answer("describe", "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE")
    stand_ins.answer("ssh", 0, 0, 255, 0, 0, 0)
    assert stand_ins.run("tpu_vm.sh", "run", *SLICE, *TRAIN).returncode == 0
    assert "delete" not in verbs(stand_ins.calls())


def test_a_connection_that_never_works_is_given_up(stand_ins):
    stand_ins.answer("describe", *["ACTIVE"] * 50)
    stand_ins.answer("ssh", *[255] * 50)
    assert stand_ins.run("tpu_vm.sh", "run", *SLICE, *TRAIN).returncode == 255
    assert verbs(stand_ins.calls()).count("ssh") == 10


def test_an_error_of_training_ends_the_run_and_keeps_the_slice(stand_ins):
    stand_ins.answer("describe", "ACTIVE", "ACTIVE", "ACTIVE")
    stand_ins.answer("ssh", 0, 0, 2)
    assert stand_ins.run("tpu_vm.sh", "run", *SLICE, *TRAIN).returncode == 2
    assert "delete" not in verbs(stand_ins.calls())


def test_a_failed_request_ends_the_run(stand_ins):
    stand_ins.answer("describe", 1, "FAILED")
    found = stand_ins.run("tpu_vm.sh", "run", *SLICE, *TRAIN)
    assert found.returncode == 1
    assert verbs(stand_ins.calls()) == ["create"]


def test_training_on_a_worker_gets_its_arguments_and_gives_its_code(stand_ins):
    code = stand_ins.directory / "home" / "adaptive_span_jax"
    (code / ".venv" / "bin").mkdir(parents=True)
    python = code / ".venv" / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@" >given\necho from training\nexit 7\n')
    python.chmod(0o755)
    stand_ins.answer("ssh", "run", "run", "run")
    assert stand_ins.run("tpu_vm.sh", "start", *SLICE, *TRAIN, ODD).returncode == 0
    found = stand_ins.run("tpu_vm.sh", "logs", *SLICE)
    assert found.returncode == 7
    assert "from training" in found.stdout
    assert (code / "given").read_text().splitlines() == ["main.py", "--config=configs/enwik8_large.py", ODD]
    assert not list(stand_ins.directory.rglob("oops"))


def test_a_second_start_leaves_a_running_one_alone(stand_ins):
    code = stand_ins.directory / "home" / "adaptive_span_jax"
    code.mkdir()
    (code / "train.pid").write_text(str(os.getpid()))
    stand_ins.answer("ssh", "run")
    assert "already running" in stand_ins.run("tpu_vm.sh", "start", *SLICE, *TRAIN).stdout
    assert not (code / "train.log").exists()


def test_code_is_packed_without_runs_and_environments(stand_ins):
    stand_ins.answer("ssh", 0)
    kept = stand_ins.directory / "kept.tar.gz"
    gcloud = stand_ins.programs / "gcloud"
    gcloud.write_text(
        gcloud.read_text() + f"\nif 'scp' in words:\n    import shutil; shutil.copy(words[4], {str(kept)!r})\n"
    )
    assert stand_ins.run("tpu_vm.sh", "install", *SLICE).returncode == 0
    names = subprocess.run(["tar", "-tzf", kept], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {"./main.py", "./launch/environment.sh", "./requirements-tpu.txt", "./configs/base.py"} <= set(names)
    assert not [name for name in names if name.startswith(("./.git/", "./.venv", "./runs", "./.pytest_cache"))]


def test_gpu_host_starts_on_all_its_gpus(stand_ins):
    stand_ins.answer("nvidia-smi", "GPU 0: A100")
    found = stand_ins.run("gpu_host.sh", "--dry-run", "--config=configs/enwik8.py", ODD)
    assert found.returncode == 0, found.stderr
    assert commands(found.stdout) == [
        ["exec", "python", "main.py", "--expect_devices=1", "--config=configs/enwik8.py", ODD]
    ]
    assert "requirements-gpu.txt" in found.stdout


def test_a_bucket_needs_its_package(stand_ins):
    stand_ins.answer("nvidia-smi", "GPU 0: A100")
    bucket = ["--config=configs/enwik8.py", "--workdir=gs://bucket/run"]
    assert "requirements-gcs.txt" in stand_ins.run("gpu_host.sh", "--dry-run", *bucket).stdout
    found = stand_ins.run("slurm.sbatch", "--nodes=2", "--dry-run", "--", *bucket, SLURM_JOB_ID="")
    assert "requirements-gcs.txt" in found.stdout
    found = stand_ins.run("tpu_vm.sh", "run", *SLICE, "--spot", "--dry-run", "--", *bucket)
    assert found.returncode == 0, found.stderr


def test_gpu_host_without_gpus_says_so(stand_ins):
    stand_ins.answer("nvidia-smi", 0)
    assert "lists no GPU" in stand_ins.run("gpu_host.sh", "--config=configs/enwik8.py").stderr


SLURM = ["--nodes=2", "--gpus=4", "--", "--config=configs/enwik8.py"]


def test_slurm_submits_itself(stand_ins):
    options = ["--time=1:00:00", "--partition=a b", "--dry-run", *SLURM, ODD]
    assert commands(stand_ins.run("slurm.sbatch", *options, SLURM_JOB_ID="").stdout) == [
        [
            *["sbatch", "--nodes=2", "--gpus-per-node=4", "--time=1:00:00", "--partition=a b"],
            *["launch/slurm.sbatch", *SLURM, ODD],
        ]
    ]
    assert not stand_ins.calls()


def test_slurm_runs_on_all_hosts_and_queues_again_until_complete(stand_ins):
    workdir = stand_ins.directory / "run"
    workdir.mkdir()
    # Slurm runs a copy, from elsewhere.
    script = Path(shutil.copy(LAUNCH / "slurm.sbatch", stand_ins.directory / "slurm_script"))
    inside = {"SLURM_JOB_ID": "11", "SLURM_SUBMIT_DIR": str(ROOT)}
    assert stand_ins.run(script, *SLURM, f"--workdir={workdir}", **inside).returncode == 0
    step = ["srun", ".venv/bin/python", "main.py", "--expect_devices=8", "--config=configs/enwik8.py"]
    assert stand_ins.calls() == [[*step, f"--workdir={workdir}"], ["scontrol", "requeue", "11"]]
    (workdir / "result.json").write_text("{}")
    assert stand_ins.run(script, *SLURM, f"--workdir={workdir}", **inside).returncode == 0
    assert [call[0] for call in stand_ins.calls()] == ["srun", "scontrol", "srun"]


def test_slurm_does_not_queue_again_after_an_error(stand_ins):
    stand_ins.answer("srun", 2)
    inside = {"SLURM_JOB_ID": "11", "SLURM_SUBMIT_DIR": str(ROOT)}
    assert stand_ins.run("slurm.sbatch", *SLURM, f"--workdir={stand_ins.directory}", **inside).returncode == 2
    assert [call[0] for call in stand_ins.calls()] == ["srun"]


def examples() -> list[str]:
    """The launch commands of the READMEs."""
    text = "".join(path.read_text() for path in (LAUNCH / "README.md", ROOT / "README.md"))
    return re.findall(r"^bash (launch/(?:tpu_vm|gpu_host|slurm|kubernetes)(?:.*\\\n)*.*)$", text, re.MULTILINE)


@pytest.mark.parametrize("example", examples())
def test_documented_commands_are_accepted(stand_ins, example):
    stand_ins.answer("nvidia-smi", "GPU 0: A100")
    script, *words = shlex.split(example.replace("\\\n", " "))
    first, rest = (words[: words.index("--")], words[words.index("--") :]) if "--" in words else (words, [])
    found = stand_ins.run(ROOT / script, *first, "--dry-run", *rest, SLURM_JOB_ID="")
    assert found.returncode == 0, found.stderr
    for file in re.findall(r"configs/\w+\.py", example):
        assert (ROOT / file).is_file()


def test_every_script_has_a_documented_example():
    assert {example.split()[0] for example in examples()} == {
        *("launch/tpu_vm.sh", "launch/gpu_host.sh", "launch/slurm.sbatch", "launch/kubernetes.sh")
    }


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
