"""Runs in a bucket, against a stand-in for Google Cloud Storage: the same as on a disk, killed or not."""

import dataclasses
import importlib.util
import json
import math
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

from adaptive_span_jax import doctor, evaluate, generate, report, sealed, sharding, storage, train, verify, workdir
from adaptive_span_jax.errors import UserError
from tests import object_storage
from tests.conftest import tiny_config
from tests.object_storage import ObjectStorage
from tests.test_kill import FIELDS, INTERVAL, ROOT, Life, last_state
from tests.test_sealed import CONTENT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs: pip install -r requirements-gcs.txt"
)


@pytest.fixture(scope="module")
def bucket():
    """An empty bucket, which this process and those that it starts find at gs://bucket."""
    with object_storage.running() as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment().items():
            patch.setenv(name, value)
        yield found
        assert found.unknown == []


def make_sealed(directory: Path, step: int) -> None:
    sealed.begin(directory, step)
    for name, content in CONTENT.items():
        (sealed.unfinished(directory, step) / name).write_bytes(content)
    sealed.seal(directory, step)


def test_a_place_is_a_folder_or_in_a_bucket(monkeypatch):
    assert storage.place("runs/a") == Path("runs/a")
    assert not storage.in_bucket(storage.place("runs/a"))
    for wrong in ("s3://bucket/run", "gs://", "gs:///run", "http://bucket"):
        with pytest.raises(UserError, match="is no place for a run"):
            storage.place(wrong)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs gcsfs: pip install -r requirements-gcs\.txt"):
        storage.place("gs://bucket/run")


def test_files_in_a_bucket(bucket):
    folder = storage.place("gs://bucket/files")
    assert storage.in_bucket(folder)
    assert storage.in_bucket(folder / "deep")
    assert storage.files(folder) == {}
    storage.make_folder(folder / "deep")
    storage.write_text(folder / "deep" / "text", "½")
    storage.write_text(folder / "deep" / "text", "1½")
    assert bucket.names("files") == ["files/deep/text"]
    assert storage.files(folder) == {"deep/text": 3}
    storage.move(folder, storage.place("gs://bucket/moved"))
    assert bucket.names("files") == []
    storage.delete(storage.place("gs://bucket/moved/deep"))
    storage.delete(storage.place("gs://bucket/moved/deep"))
    assert bucket.names("moved") == []
    assert storage.free_bytes(folder) == math.inf


def test_sealed_folders_in_a_bucket(bucket, capsys):
    directory = storage.place("gs://bucket/sealed/checkpoints")
    assert sealed.sealed_steps(directory) == []
    make_sealed(directory, 5)
    assert sealed.sealed_steps(directory) == [5]
    assert sealed.find_damage(directory / "5") is None
    with pytest.raises(FileExistsError):
        sealed.begin(directory, 5)
    assert sealed.sealed_steps(directory) == [5]

    make_sealed(directory, 6)
    (directory / "6" / "deep" / "c").write_bytes(b"thrEe")
    assert verify.verify(directory.parent, "command") == 1
    assert "damaged: deep/c is not what was written" in capsys.readouterr().out
    assert str(sealed.set_aside(directory / "6")) == "gs://bucket/sealed/checkpoints/damaged/6"
    make_sealed(directory, 6)
    (directory / "6" / "a").unlink()
    assert sealed.find_damage(directory / "6") == "a is missing"
    assert sealed.set_aside(directory / "6").name == "6.2"
    assert len(bucket.names("sealed/checkpoints/damaged/6/")) == len(CONTENT) + 1
    assert sealed.sealed_steps(directory) == [5]

    make_sealed(directory, 7)
    (directory / "7" / sealed.SUMS).unlink()
    assert sealed.sealed_steps(directory) == [5, 7], "lost hashes are damage, not an unfinished folder"
    assert sealed.find_damage(directory / "7") == "SHA256SUMS is missing"


@pytest.fixture
def cut_off(bucket: ObjectStorage, monkeypatch):
    """After so many changes the bucket takes no more, as if the process had been killed there."""

    def after(changes: float) -> None:
        left = changes

        def take() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        monkeypatch.setattr(bucket, "takes_a_change", take)

    return after


@pytest.mark.slow
def test_at_whichever_request_a_process_is_killed_nothing_looks_whole_that_is_not(bucket, cut_off):
    finished = 0
    for changes in range(100):
        directory = storage.place(f"gs://bucket/cut{changes}/checkpoints")
        make_sealed(directory, 5)
        told = []
        cut_off(changes)
        try:
            make_sealed(directory, 6)
            told.append("saved")
            sealed.delete(directory, 5)
            told.append("deleted")
        except OSError:
            pass
        cut_off(math.inf)
        steps = sealed.sealed_steps(directory)
        assert [sealed.find_damage(directory / str(step)) for step in steps] == [None] * len(steps)
        assert (6 in steps) == ("saved" in told)
        assert 5 in steps or "saved" in told

        before = [name for name in bucket.names(f"cut{changes}/") if "/6/" in name]
        sealed.finish_deleting(directory)
        for folder in sealed.leftovers(directory):
            sealed.set_aside(folder)
        assert sealed.sealed_steps(directory) == steps
        left = bucket.names(f"cut{changes}/checkpoints/")
        assert len([name for name in left if "/6" in name]) == len(before), "what was written is set aside, not deleted"
        assert not [name for name in left if name.endswith((".unfinished", ".deleting"))]
        assert not [name for name in left if "checkpoints/5/" in name] or 5 in steps
        if told == ["saved", "deleted"]:
            finished = changes
            break
    assert finished > 2 * len(CONTENT)


def test_moving_that_is_cut_short_loses_nothing(bucket, cut_off):
    for changes in range(len(CONTENT) + 1):
        directory = storage.place(f"gs://bucket/move{changes}/checkpoints")
        make_sealed(directory, 5)
        (directory / "5" / "a").write_bytes(b"damaged")
        cut_off(changes)
        with pytest.raises(OSError, match="Forbidden"):
            sealed.set_aside(directory / "5")
        cut_off(math.inf)
        assert sealed.find_damage(directory / "5") is not None
        sealed.set_aside(directory / "5")
        assert sealed.sealed_steps(directory) == []
        assert len(bucket.names(f"move{changes}/checkpoints/damaged/")) == len(CONTENT) + 1


@pytest.mark.slow
def test_every_mode_works_in_a_bucket(bucket, capsys, tmp_path, monkeypatch):
    mesh = sharding.make_mesh(jax.devices()[:1])
    monkeypatch.setattr(sharding, "make_mesh", lambda devices=None, fsdp=1: mesh)
    place = storage.place("gs://bucket/modes")
    config = tiny_config(train={"steps": 12}, log={"every_steps": 4}, checkpoint={"every_steps": 5, "keep": 1})
    assert doctor.doctor(config, place, expected=8) == 0
    assert "gs://bucket/modes can be written, in a bucket" in capsys.readouterr().out
    assert bucket.names("modes") == []

    assert train.train(config, place, "command") == 0
    printed = capsys.readouterr().out
    assert "step 10 is saved" in printed
    assert sealed.sealed_steps(place / "checkpoints") == [12]
    lines = [json.loads(line) for line in bucket.objects["modes/metrics.jsonl"].content.splitlines()]
    assert [line["step"] for line in lines if "train_bits" in line] == [4, 8]
    assert json.loads(bucket.objects["modes/config.json"].content) == json.loads(config.to_json())
    assert len(bucket.names("modes/tensorboard/events")) == 1
    assert bucket.objects["modes/report/index.html"].content.startswith(b"<!DOCTYPE html>")
    assert bucket.objects["modes/report/spans.png"].content.startswith(b"\x89PNG")
    assert train.train(config, place, "command") == 0
    assert "This run is complete" in capsys.readouterr().out

    assert evaluate.evaluate(config, place, "latest") == 0
    result = json.loads(bucket.objects["modes/result.json"].content)
    evaluation = json.loads(bucket.objects["modes/evaluation.json"].content)
    assert evaluation["dev_exact"]["bits"] == pytest.approx(result["dev_bits"], rel=1e-6)
    assert generate.generate(config.generate, place, "12", "import", None) == 0
    del bucket.objects["modes/report/index.html"]
    assert report.report(place, "latest") == 0
    assert "modes/report/index.html" in bucket.objects
    assert verify.verify(place, "command") == 0

    tuned = dataclasses.replace(config, init_from="gs://bucket/modes")
    assert train.train(tuned, tmp_path / "tuned", "command") == 0
    assert "weights of step 12 of gs://bucket/modes" in capsys.readouterr().out


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
    with pytest.raises(UserError, match="gs://no-such-bucket/run cannot be written"):
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
    fields = FIELDS | {"span.kind": "adaptive", "train.steps": 60}
    command = [sys.executable, "main.py", "--workdir=gs://bucket/killed", *arguments]
    command += [f"--config.{name}={value}" for name, value in fields.items()]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_killed_in_a_bucket_is_the_run_on_a_disk_that_never_was(bucket, tmp_path, monkeypatch):
    """Real processes: killed in the middle of a save, gone on with, damaged, gone on with again."""
    in_the_middle_of_a_save, go_on, write = threading.Event(), threading.Event(), bucket.write

    def write_slowly(name: str, *arguments: Any) -> Any:
        if name.startswith("killed/checkpoints/30/params/") and "/d/" in name:
            in_the_middle_of_a_save.set()
            go_on.wait(120)
        return write(name, *arguments)

    monkeypatch.setattr(bucket, "write", write_slowly)
    whole = Life(tmp_path / "whole", tmp_path / "jax", "adaptive", 60)
    assert whole.end() == 0, whole.printed

    place = storage.place("gs://bucket/killed")
    killed = Life(place, tmp_path / "jax", "adaptive", 60)
    assert in_the_middle_of_a_save.wait(120), killed.printed
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL, killed.printed
    go_on.set()
    last = Life(place, tmp_path / "jax", "adaptive", 60)
    assert last.end() == 0, last.printed
    assert last.started_at == killed.reported == 2 * INTERVAL
    assert "30.unfinished was being written when a process was killed; set aside: gs://" in last.printed
    assert bucket.names("killed/checkpoints/damaged/30.unfinished/")
    check_same_ends(tmp_path / "whole", place)

    # The newest is damaged: verify says so, and the same command makes it again from the one before.
    name = max(bucket.names("killed/checkpoints/60/params/d/"), key=lambda name: len(bucket.objects[name].content))
    content = bytearray(bucket.objects[name].content)
    content[len(content) // 2] ^= 1
    bucket.write(name, bytes(content))
    found = run_main("--mode=verify")
    assert (found.returncode, found.stderr) == (1, "")
    assert re.search(r"damaged/30.unfinished +set aside earlier", found.stdout)
    assert re.search(r"step 60 +damaged: params/d/.* is not what was written", found.stdout)
    again = Life(place, tmp_path / "jax", "adaptive", 60)
    assert again.end() == 0, again.printed
    assert again.started_at == 50
    assert "it is set aside: gs://bucket/killed/checkpoints/damaged/60" in again.printed
    check_same_ends(tmp_path / "whole", place)
    assert verify.verify(place, "command") == 0


def check_same_ends(one: Path, other: Path) -> None:
    (arrays, about), (other_arrays, other_about) = last_state(one, 60), last_state(other, 60)
    assert about == other_about
    jax.tree.map(assert_array_equal, arrays, other_arrays)
    results = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}
    logs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    bits = [[(line["step"], line["train_bits"]) for line in log if "train_bits" in line] for log in logs]
    assert bits[0] == bits[1]
