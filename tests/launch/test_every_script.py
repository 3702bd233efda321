"""All launch scripts: no shellcheck findings, clear errors, documented commands that work."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig

import pytest

from tests.support.launch_stand_ins import LAUNCH, ROOT, SCRIPTS, SLICE, TRAIN


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
        ("slurm.sbatch", ["--nodes=two", *TRAIN], "--nodes=N is missing or not a number"),
        ("slurm.sbatch", ["--nodes=2"], "no --config=… after --"),
        ("slurm.sbatch", ["--nodes=2", *TRAIN], "--workdir after -- must be an absolute path"),
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


def test_a_bucket_needs_its_package(stand_ins):
    stand_ins.answer("nvidia-smi", "GPU 0: A100")
    bucket = ["--config=configs/enwik8.py", "--workdir=gs://bucket/run"]
    assert "requirements-gcs.txt" in stand_ins.run("gpu_host.sh", "--dry-run", *bucket).stdout
    found = stand_ins.run("slurm.sbatch", "--nodes=2", "--dry-run", "--", *bucket, SLURM_JOB_ID="")
    assert "requirements-gcs.txt" in found.stdout
    found = stand_ins.run("tpu_vm.sh", "run", *SLICE, "--spot", "--dry-run", "--", *bucket)
    assert found.returncode == 0, found.stderr


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
