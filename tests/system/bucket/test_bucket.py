"""Files and sealed folders in a bucket: whichever request a kill interrupts, nothing incomplete looks intact."""

import importlib.util
import math
from pathlib import Path

import pytest

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.commands import verify
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import storage
from tests.support.object_storage import ObjectStorage
from tests.support.sealed_folders import CONTENT
from tests.system.bucket.conftest import make_sealed, needs_gcsfs

pytestmark = needs_gcsfs


def test_a_place_is_a_folder_or_in_a_bucket(monkeypatch):
    assert storage.place("runs/a") == Path("runs/a")
    assert not storage.in_bucket(storage.place("runs/a"))
    for wrong in ("s3://bucket/run", "gs://", "gs:///run", "http://bucket"):
        with pytest.raises(UserError, match="is not a valid workdir"):
            storage.place(wrong)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"requires gcsfs: run pip install \"\.\[gcs\]\""):
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
    assert sealing.sealed_steps(directory) == []
    make_sealed(directory, 5)
    assert sealing.sealed_steps(directory) == [5]
    assert sealing.find_damage(directory / "5") is None
    with pytest.raises(FileExistsError):
        sealing.begin(directory, 5)
    assert sealing.sealed_steps(directory) == [5]

    make_sealed(directory, 6)
    (directory / "6" / "deep" / "c").write_bytes(b"thrEe")
    assert verify.verify(directory.parent) == 1
    assert "damaged: deep/c has changed" in capsys.readouterr().out
    assert str(sealing.set_aside(directory / "6")) == "gs://bucket/sealed/checkpoints/damaged/6"
    make_sealed(directory, 6)
    (directory / "6" / "a").unlink()
    assert sealing.find_damage(directory / "6") == "a is missing"
    assert sealing.set_aside(directory / "6").name == "6.2"
    assert len(bucket.names("sealed/checkpoints/damaged/6/")) == len(CONTENT) + 1
    assert sealing.sealed_steps(directory) == [5]

    make_sealed(directory, 7)
    (directory / "7" / sealing.SUMS).unlink()
    assert sealing.sealed_steps(directory) == [5, 7], "lost hashes are damage, not an unfinished folder"
    assert sealing.find_damage(directory / "7") == "SHA256SUMS is missing"


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
            sealing.delete(directory, 5)
            told.append("deleted")
        except OSError:
            pass
        cut_off(math.inf)
        steps = sealing.sealed_steps(directory)
        assert [sealing.find_damage(directory / str(step)) for step in steps] == [None] * len(steps)
        assert (6 in steps) == ("saved" in told)
        assert 5 in steps or "saved" in told

        before = [name for name in bucket.names(f"cut{changes}/") if "/6/" in name]
        sealing.finish_deleting(directory)
        for folder in sealing.leftovers(directory):
            sealing.discard(folder)
        assert sealing.sealed_steps(directory) == steps
        left = bucket.names(f"cut{changes}/checkpoints/")
        assert [name for name in left if "/6" in name] == (before if 6 in steps else [])
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
            sealing.set_aside(directory / "5")
        cut_off(math.inf)
        assert sealing.find_damage(directory / "5") is not None
        sealing.set_aside(directory / "5")
        assert sealing.sealed_steps(directory) == []
        assert len(bucket.names(f"move{changes}/checkpoints/damaged/")) == len(CONTENT) + 1
