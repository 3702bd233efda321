"""launch/tpu_vm.sh: a slice from request to deletion, with preemptions and lost connections."""

import os
import subprocess

import pytest

from tests.support.launch_stand_ins import ODD, SLICE, TRAIN, commands


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
