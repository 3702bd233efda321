"""A local archive instead of the download: which ones are accepted, and the errors for the others."""

import bz2
import gzip
import hashlib
import io
import lzma
import zipfile
from pathlib import Path

import pytest

from adaptive_span_jax.data import corpus
from adaptive_span_jax.data.tfds.enwik8 import Enwik8
from adaptive_span_jax.data.tfds.source import Source
from adaptive_span_jax.errors import UserError
from tests.support.published_texts import data, enwik8_text, files_in, text8_text, zipped


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
def test_the_text_itself_will_do_as_archive(tmp_path, suffix):
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix]
    archive = tmp_path / f"enwik8{suffix}"
    archive.write_bytes(pack(enwik8_text()))
    loaded = corpus.load(data(tmp_path / "cache", archive=archive))
    reference = corpus.load(data(tmp_path / "other", archive=tmp_path / "enwik8.zip"))
    assert loaded.fingerprint == reference.fingerprint


def test_a_zip_that_was_packed_again_is_taken_for_its_text(tmp_path):
    (tmp_path / "again.zip").write_bytes(zipped("folder/text", enwik8_text()))
    assert (tmp_path / "again.zip").read_bytes() != (tmp_path / "enwik8.zip").read_bytes()
    loaded = corpus.load(data(tmp_path / "cache", archive=tmp_path / "again.zip"))
    assert loaded.decode(loaded.train) == enwik8_text()[:18_009]


def bad_archives() -> dict[str, tuple[str, bytes]]:
    good = zipped("enwik8", enwik8_text())
    flipped = bytearray(enwik8_text())
    flipped[12_345] ^= 1
    return {
        "truncated zip": ("enwik8.zip", good[:-100]),
        "empty zip": ("enwik8.zip", b""),
        "swapped": ("enwik8.zip", zipped("text8", text8_text())),
        "flipped zip": ("enwik8.zip", zipped("enwik8", bytes(flipped))),
        "flipped plain": ("enwik8", bytes(flipped)),
        "truncated plain": ("enwik8", enwik8_text()[:-1]),
        "flipped gz": ("enwik8.gz", gzip.compress(bytes(flipped))),
        "zip without its suffix": ("enwik8", good),
    }


def text_in(content: bytes, name: str) -> bytes:
    """What can be hashed of an archive: its text, or itself where it cannot be unpacked."""
    if name.endswith(".gz"):
        return gzip.decompress(content)
    if not name.endswith(".zip") or not zipfile.is_zipfile(io.BytesIO(content)):
        return content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        [inside] = archive.namelist()
        return archive.read(inside)


@pytest.mark.parametrize("case", bad_archives())
def test_a_wrong_archive_is_refused_with_both_hashes_and_leaves_nothing(tmp_path, case):
    name, content = bad_archives()[case]
    archive = tmp_path / name
    archive.write_bytes(content)
    with pytest.raises(UserError) as error:
        corpus.load(data(tmp_path / "cache", archive=archive))
    facts = Enwik8.SOURCE
    found = hashlib.sha256(text_in(content, name)).hexdigest()
    message = str(error.value)
    assert str(archive) in message
    assert f"{facts.text_bytes:,} bytes with SHA-256 {facts.text_sha256}" in message
    assert f"with SHA-256 {found}" in message
    assert f"Download {facts.url}" in message
    assert files_in(tmp_path / "cache") == [".enwik8.lock"]
    corpus.load(data(tmp_path / "cache", archive=write_good(tmp_path)))  # and the right one then works


def write_good(tmp_path: Path) -> Path:
    (tmp_path / "enwik8.zip").write_bytes(zipped("enwik8", enwik8_text()))
    return tmp_path / "enwik8.zip"


def test_the_right_zip_with_the_wrong_text_is_refused(tmp_path, monkeypatch):
    facts = Enwik8.SOURCE
    other = "0" * 64
    wrong = Source(facts.name, facts.url, facts.zip_bytes, facts.zip_sha256, facts.text_bytes, other)
    monkeypatch.setattr(Enwik8, "SOURCE", wrong)
    with pytest.raises(UserError, match=f"expected 20,011 bytes with SHA-256 {other}, got .* {facts.text_sha256}"):
        corpus.load(data(tmp_path / "cache", archive=tmp_path / "enwik8.zip"))


def test_a_truncated_gz_says_what_was_expected(tmp_path):
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(enwik8_text())[:-50])
    found = hashlib.sha256((tmp_path / "enwik8.gz").read_bytes()).hexdigest()
    with pytest.raises(
        UserError, match=f"enwik8.gz cannot be read: .*{Enwik8.SOURCE.text_sha256}.* the file has .*{found}"
    ):
        corpus.load(data(tmp_path / "cache", archive=tmp_path / "enwik8.gz"))
    assert files_in(tmp_path / "cache") == [".enwik8.lock"]


def test_a_missing_archive_is_named(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}/gone.zip does not exist. Download http"):
        corpus.load(data(tmp_path / "cache", archive=tmp_path / "gone.zip"))


def test_a_folder_as_archive_is_named(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path} is a folder; pass the file: .*archive={tmp_path}/enwik8.zip"):
        corpus.load(data(tmp_path / "cache", archive=tmp_path))
    assert files_in(tmp_path / "cache") == [".enwik8.lock"]
