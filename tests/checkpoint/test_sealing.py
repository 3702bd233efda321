"""Sealed folders: damage is detected, nothing is lost, and the name of a folder gives its state."""

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.commands import verify
from adaptive_span_jax.errors import UserError
from tests.support.sealed_folders import CONTENT, make_sealed


def test_what_is_sealed_is_whole(tmp_path):
    folder = make_sealed(tmp_path)
    assert sealing.sealed_steps(tmp_path) == [5]
    assert sealing.leftovers(tmp_path) == []
    heard = []
    assert sealing.find_damage(folder, heard.append) is None
    assert heard[-1] == 1
    by_hand = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert by_hand.returncode == 0
    assert by_hand.stdout.count("OK") == len(CONTENT)


@pytest.fixture(scope="module")
def sealed_folder(tmp_path_factory):
    return make_sealed(tmp_path_factory.mktemp("sealed"))


@settings(deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_found(sealed_folder, data):
    path = sealed_folder / data.draw(st.sampled_from(["a", "deep/er/b", "deep/c", sealing.SUMS]))
    content = path.read_bytes()
    place, change = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    path.write_bytes(content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])
    try:
        assert sealing.find_damage(sealed_folder) is not None
    finally:
        path.write_bytes(content)


def test_a_changed_line_end_in_the_sums_is_found(sealed_folder):
    content = (sealed_folder / sealing.SUMS).read_bytes()
    for other in b"\r\v\f \x00":
        (sealed_folder / sealing.SUMS).write_bytes(content.replace(b"\n", bytes([other]), 1))
        assert sealing.find_damage(sealed_folder) is not None
    (sealed_folder / sealing.SUMS).write_bytes(content)


@pytest.mark.parametrize("name", [*CONTENT, sealing.SUMS])
def test_lost_and_cut_files_are_named(tmp_path, name):
    folder = make_sealed(tmp_path)
    if size := (folder / name).stat().st_size:
        os.truncate(folder / name, size - 1)
        assert sealing.find_damage(folder)
    (folder / name).unlink()
    assert f"{name} is missing" in str(sealing.find_damage(folder))


def test_an_empty_folder_is_not_whole(tmp_path):
    (tmp_path / "5").mkdir()
    assert sealing.find_damage(tmp_path / "5") == "SHA256SUMS is missing"
    (tmp_path / "5" / sealing.SUMS).write_text("")
    assert sealing.find_damage(tmp_path / "5") == "SHA256SUMS is empty"


def test_a_file_too_many_is_named(tmp_path):
    folder = make_sealed(tmp_path)
    (folder / "deep" / "more").write_bytes(b"")
    assert sealing.find_damage(folder) == "deep/more is not in SHA256SUMS"


def test_a_file_that_may_not_be_read_says_nothing_of_its_content(tmp_path, monkeypatch):
    folder = make_sealed(tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("hashlib.file_digest", refuse)
    with pytest.raises(UserError, match="cannot be read \\(Permission denied\\)"):
        sealing.find_damage(folder)


def test_setting_aside_keeps_everything(tmp_path):
    first = sealing.set_aside(make_sealed(tmp_path))
    second = sealing.set_aside(make_sealed(tmp_path))
    assert (first.name, second.name) == ("5", "5.2")
    assert sealing.sealed_steps(tmp_path) == []
    assert sealing.find_damage(first) is None
    assert sealing.find_damage(second) is None


def test_a_deletion_that_was_cut_short_is_finished_and_nothing_else(tmp_path):
    make_sealed(tmp_path, 5)
    make_sealed(tmp_path, 6).rename(tmp_path / "6.deleting")
    make_sealed(tmp_path, 7).rename(tmp_path / "7.unfinished")
    sealing.finish_deleting(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["5", "7.unfinished"]
    sealing.delete(tmp_path, 5)
    assert sealing.sealed_steps(tmp_path) == []


def test_verify_tells_whole_from_damaged(tmp_path, capsys):
    with pytest.raises(UserError, match="no checkpoints to verify; pass the workdir of a run"):
        verify.verify(tmp_path)
    directory = tmp_path / "checkpoints"
    make_sealed(directory, 5)
    sealing.set_aside(make_sealed(directory, 6))
    make_sealed(directory, 8).rename(directory / "8.unfinished")
    assert verify.verify(tmp_path) == 0
    printed = capsys.readouterr().out
    for expected in ("step 5 ", "intact", "damaged/6", "set aside earlier", "8.unfinished", "unfinished:"):
        assert expected in printed
    (make_sealed(directory, 7) / "a").write_bytes(b"two")
    before = sorted(directory.rglob("*"))
    assert verify.verify(tmp_path) == 1
    assert "damaged: a has changed" in capsys.readouterr().out
    assert sorted(directory.rglob("*")) == before
