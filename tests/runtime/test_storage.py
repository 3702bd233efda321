"""Files that are written atomically. Buckets: tests/system/bucket."""

import pytest

from adaptive_span_jax.runtime import storage


def test_an_error_while_writing_keeps_the_old_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "file"
    storage.write_text(path, "old")

    def fail() -> None:
        with storage.replacing(path) as new:
            new.write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_until_the_end_the_old_file_is_there(tmp_path):
    path = tmp_path / "file"
    storage.write_text(path, "old")
    with storage.replacing(path, ".part") as new:
        new.write_text("new")
        assert new == tmp_path / "file.part"
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
