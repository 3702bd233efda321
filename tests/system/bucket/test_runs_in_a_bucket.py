"""Runs in a bucket: every mode, killed or not, as on disk."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import pytest
from numpy.testing import assert_array_equal

from adaptive_span_jax.checkpoint import sealing, workdir
from adaptive_span_jax.commands import doctor, evaluate, generate, profile, train, verify
from adaptive_span_jax.commands import report as report_command
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import sharding, storage
from tests.conftest import tiny_config
from tests.support.kills import BETWEEN_SAVES, ROOT, Life, last_state
from tests.support.results import without_times
from tests.system.bucket.conftest import needs_gcsfs

STEPS = {"train.steps": 60}

pytestmark = needs_gcsfs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sending a large body")  # a trace of some megabytes, which gcsfs sends in one piece
def test_every_mode_works_in_a_bucket(bucket, capsys, tmp_path, monkeypatch):
    mesh = sharding.make_mesh(jax.devices()[:1])
    monkeypatch.setattr(sharding, "make_mesh", lambda devices=None, fsdp=1: mesh)
    place = storage.place("gs://bucket/modes")
    config = tiny_config(train={"steps": 12}, log={"every_steps": 4}, checkpoint={"every_steps": 6, "keep": 1})
    assert doctor.doctor(config, place, expected=8) == 0
    assert "gs://bucket/modes is writable, in a bucket" in capsys.readouterr().out
    assert bucket.names("modes") == []

    assert train.train(config, place, "command") == 0
    printed = capsys.readouterr().out
    assert "step 10 is saved" in printed
    assert sealing.sealed_steps(place / "checkpoints") == [12]
    lines = [json.loads(line) for line in bucket.objects["modes/metrics.jsonl"].content.splitlines()]
    assert [line["step"] for line in lines if "train_bits" in line] == [4, 8, 12]
    assert json.loads(bucket.objects["modes/config.json"].content) == json.loads(config.to_json())
    assert len(bucket.names("modes/tensorboard/events")) == 1
    assert bucket.objects["modes/report/index.html"].content.startswith(b"<!DOCTYPE html>")
    assert bucket.objects["modes/report/spans.png"].content.startswith(b"\x89PNG")
    assert train.train(config, place, "command") == 0
    assert "This run is complete" in capsys.readouterr().out

    assert evaluate.evaluate(place, "latest") == 0
    result = json.loads(bucket.objects["modes/result.json"].content)
    evaluation = json.loads(bucket.objects["modes/evaluation.json"].content)
    assert evaluation["dev_exact"]["bits"] == pytest.approx(result["dev_bits"], rel=1e-6)
    assert generate.generate(place, "12", "import", None) == 0
    before = set(bucket.names("modes"))
    assert profile.profile(config, place) == 0
    added = set(bucket.names("modes")) - before
    assert all(name.startswith("modes/profile/") for name in added)
    assert {name.rpartition(".")[2] for name in added} == {"csv", "pb", "gz"}
    del bucket.objects["modes/report/index.html"]
    assert report_command.report(place, "latest") == 0
    assert "modes/report/index.html" in bucket.objects
    assert verify.verify(place) == 0

    tuned = dataclasses.replace(config, init_from="gs://bucket/modes")
    assert train.train(tuned, tmp_path / "tuned", "command") == 0
    assert "initialized from step 12 of gs://bucket/modes" in capsys.readouterr().out


def test_who_has_not_said_that_he_ended_is_named(bucket, capsys):
    place = storage.place("gs://bucket/tagged")
    with workdir.only_user(place):
        assert bucket.objects["tagged/.lock"].content.startswith(f"process {os.getpid()} on ".encode())
        assert capsys.readouterr().out == ""
        with workdir.only_user(place):
            assert f"warning: process {os.getpid()} on " in capsys.readouterr().out
    with workdir.only_user(place):
        assert capsys.readouterr().out == ""


def test_a_bucket_that_is_not_there_is_named(bucket):
    with pytest.raises(UserError, match="gs://no-such-bucket/run is not writable"):
        workdir.make_workdir(storage.place("gs://no-such-bucket/run"))


def test_a_slurm_job_queues_again_until_its_result_is_in_the_bucket(bucket, monkeypatch):
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("the script uses .venv, which launch/environment.sh makes")
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    words = ["--nodes=1", "--dry-run", "--", "--config=configs/enwik8.py", "--workdir=gs://bucket/slurm"]
    command = ["bash", "launch/slurm.sbatch", *words]
    assert "scontrol requeue 11" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    bucket.write("slurm/result.json", b"{}")
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0
    assert "requeue" not in found.stdout


def run_main(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "main.py", "--workdir=gs://bucket/killed", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_killed_in_a_bucket_is_the_run_on_a_disk_that_never_was(bucket, tmp_path, monkeypatch):
    """Real processes: killed in the middle of a save, gone on with, damaged, gone on with again."""
    in_the_middle_of_a_save, resume, write = threading.Event(), threading.Event(), bucket.write

    def write_slowly(name: str, *arguments: Any) -> Any:
        if name.startswith("killed/checkpoints/30/params/") and "/d/" in name:
            in_the_middle_of_a_save.set()
            resume.wait(120)
        return write(name, *arguments)

    monkeypatch.setattr(bucket, "write", write_slowly)
    whole = Life(tmp_path / "whole", tmp_path / "jax", STEPS)
    assert whole.end() == 0, whole.printed

    place = storage.place("gs://bucket/killed")
    killed = Life(place, tmp_path / "jax", STEPS)
    assert in_the_middle_of_a_save.wait(120), killed.printed
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL, killed.printed
    resume.set()
    last = Life(place, tmp_path / "jax", STEPS)
    assert last.end() == 0, last.printed
    assert last.started_at == killed.reported == 2 * BETWEEN_SAVES
    assert "deleted 30.unfinished: a process was killed while writing it" in last.printed
    assert not [name for name in bucket.names("killed/checkpoints/") if "30.unfinished" in name or "damaged" in name]
    check_same_ends(tmp_path / "whole", place)

    # The newest is damaged: verify says so, and the same command makes it again from the one before.
    name = max(bucket.names("killed/checkpoints/60/params/d/"), key=lambda name: len(bucket.objects[name].content))
    content = bytearray(bucket.objects[name].content)
    content[len(content) // 2] ^= 1
    bucket.write(name, bytes(content))
    found = run_main("--mode=verify")
    assert (found.returncode, found.stderr) == (1, "")
    assert "30.unfinished" not in found.stdout
    assert re.search(r"step 60 +damaged: params/d/.* has changed", found.stdout)
    again = Life(place, tmp_path / "jax", STEPS)
    assert again.end() == 0, again.printed
    assert again.started_at == 50
    assert "moved it to gs://bucket/killed/checkpoints/damaged/60" in again.printed
    check_same_ends(tmp_path / "whole", place)
    assert verify.verify(place) == 0


def check_same_ends(one: Path, other: Path) -> None:
    (arrays, about), (other_arrays, other_about) = last_state(one, 60), last_state(other, 60)
    assert about == other_about
    jax.tree.map(assert_array_equal, arrays, other_arrays)
    results = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    assert without_times(results[0]) == without_times(results[1])
    logs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    bits = [[(line["step"], line["train_bits"]) for line in log if "train_bits" in line] for log in logs]
    assert bits[0] == bits[1]
