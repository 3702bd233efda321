import bz2
import dataclasses
import gzip
import lzma
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import numpy.testing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import adaptive_span_jax.config
from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.data import corpus, text_files
from adaptive_span_jax.errors import UserError

ROOT = Path(adaptive_span_jax.config.__file__).parents[1]
TEXT = b"to be, or not to be:\nthat is the question.\n" * 10  # 430 bytes


def data(**fields) -> DataConfig:
    return dataclasses.replace(DataConfig("files", "", "", "", "keep", (0.9, 0.05, 0.05), 0), **fields)


def load_text(tmp_path: Path, text: bytes, **fields) -> corpus.Corpus:
    path = tmp_path / "text.txt"
    path.write_bytes(text)
    return corpus.load(data(path=str(path), **fields))


def test_a_file_becomes_ids_in_order_of_first_appearance(tmp_path):
    loaded = load_text(tmp_path, TEXT)
    assert (loaded.name, loaded.unit) == ("files", "byte")
    assert b"".join(loaded.vocabulary) == b"to be,rn:\nhaisqu."
    npt.assert_array_equal(loaded.train[:9], [0, 1, 2, 3, 4, 5, 2, 1, 6])
    assert [len(loaded.train), len(loaded.dev), len(loaded.test)] == [387, 22, 21]
    assert loaded.train.dtype == loaded.dev.dtype == loaded.test.dtype == np.uint8
    assert loaded.decode(np.concatenate([loaded.train, loaded.dev, loaded.test])) == TEXT


def test_given_splits(tmp_path):
    loaded = load_text(tmp_path, TEXT, splits=(0.5, 0.25, 0.25))
    assert [len(loaded.train), len(loaded.dev), len(loaded.test)] == [215, 107, 108]


def test_newlines_can_be_dropped(tmp_path):
    loaded = load_text(tmp_path, TEXT, newlines="drop")
    assert b"\n" not in loaded.vocabulary
    assert loaded.decode(np.concatenate([loaded.train, loaded.dev, loaded.test])) == TEXT.replace(b"\n", b"")


def test_max_bytes(tmp_path):
    loaded = load_text(tmp_path, TEXT, max_bytes=100)
    assert loaded.decode(np.concatenate([loaded.train, loaded.dev, loaded.test])) == TEXT[:100]


def write_zip(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zip"])
@pytest.mark.parametrize("limit", [-1, 300])
def test_packed_files_are_unpacked(tmp_path, suffix, limit):
    path = tmp_path / f"text{suffix}"
    if suffix == ".zip":
        write_zip(path, {"b": TEXT[100:], "a": TEXT[:100], "__MACOSX/._a": b"no text"})
    else:
        path.write_bytes({".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix](TEXT))
    assert text_files.unpacked(path, limit) == TEXT[: len(TEXT) if limit < 0 else limit]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zip"])
def test_damaged_packed_files_are_named(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    path.write_bytes(b"not packed at all")
    with pytest.raises(UserError, match=re.escape(f"{path} cannot be read")):
        corpus.load(data(path=str(path)))
    write_zip(path, {"text": os.urandom(2000)})
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(suffix, lambda _: path.read_bytes())
    path.write_bytes(packed(os.urandom(2000))[:1000])
    with pytest.raises(UserError, match=re.escape(f"{path} cannot be read")):
        corpus.load(data(path=str(path)))


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/c/y.txt", "c.txt", ".hidden", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 20)
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    files = text_files.files_under(str(tmp_path))
    assert [str(file.relative_to(tmp_path)) for file in files] == ["a/c/y.txt", "a/z.txt", "b.txt", "c.txt", "c.txt.gz"]
    text = text_files.read_text(files)
    assert text == b"a/c/y.txt" * 20 + b"a/z.txt" * 20 + b"b.txt" * 20 + b"c.txt" * 20 + b"packed"
    for limit in (1, 180, 181, 300, len(text), len(text) + 1):
        assert text_files.read_text(files, limit) == text[:limit]


def test_symbols_that_train_lacks_get_the_ids_after_those_of_train():
    loaded = corpus.from_texts("files", "byte", [b"abab", b"bcdc", b"eda"])
    assert loaded.vocabulary == (b"a", b"b", b"c", b"d", b"e")
    npt.assert_array_equal(loaded.dev, [1, 2, 3, 2])
    npt.assert_array_equal(loaded.test, [4, 3, 0])


@given(st.lists(st.binary(min_size=2, max_size=300), min_size=3, max_size=3))
def test_ids_decode_to_the_text_and_follow_first_appearance(texts):
    loaded = corpus.from_texts("files", "byte", texts)
    assert b"".join(loaded.vocabulary) == bytes(dict.fromkeys(b"".join(texts)))
    for text, ids in zip(texts, (loaded.train, loaded.dev, loaded.test), strict=True):
        assert loaded.decode(ids) == text
        npt.assert_array_equal(loaded.encode(text), ids)


def test_first_appearance_counts_across_pieces():
    text = b"z" * 70_000 + b"y" + b"z" * 70_000 + b"xy"  # longer than the pieces in which the text is searched
    assert corpus.from_texts("files", "byte", [text, b"zz", b"zz"]).vocabulary == (b"z", b"y", b"x")


def test_all_256_bytes_fit():
    loaded = corpus.from_texts("files", "byte", [bytes(range(255, -1, -1)), b"ab", b"cd"])
    assert len(loaded.vocabulary) == 256
    npt.assert_array_equal(loaded.train, np.arange(256))


def test_encoding_an_unseen_symbol_names_it():
    loaded = corpus.from_texts("files", "byte", [b"abab", b"ab", b"ab"])
    with pytest.raises(UserError, match=re.escape("The symbol b'\\xff' at byte 2 is not among the 2 symbols of files")):
        loaded.encode(b"ab\xffab")


def test_the_fingerprint_sees_ids_cuts_and_vocabulary():
    same = [b"abcabc", b"abc", b"abc"]
    different = [[b"abcabb", b"abc", b"abc"], [b"abcabca", b"bc", b"abc"], [b"xbcxbc", b"xbc", b"xbc"]]
    first = corpus.from_texts("files", "byte", same).fingerprint
    assert re.fullmatch("[0-9a-f]{12}", first)
    assert corpus.from_texts("files", "byte", list(same)).fingerprint == first
    assert first not in {corpus.from_texts("files", "byte", texts).fingerprint for texts in different}


def test_stdlib_is_another_list_of_files(tmp_path):
    files = text_files.stdlib_files()
    parts = {part for file in files for part in file.parts}
    assert "argparse.py" in parts
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert 5e6 < sum(file.stat().st_size for file in files) < 30e6
    loaded = corpus.load(data(source="stdlib", max_bytes=100_000))
    assert (loaded.name, loaded.unit, len(loaded.train), len(loaded.test)) == ("stdlib", "byte", 90_000, 5_000)
    again = load_text(tmp_path, text_files.read_text(files, 100_000))
    assert again.fingerprint == loaded.fingerprint


def test_opening_files_needs_neither_jax_nor_tfds(tmp_path):
    program = f"""
import sys
from adaptive_span_jax.data import corpus
from adaptive_span_jax.config import DataConfig
corpus.prepare(DataConfig("stdlib", "", "", {str(tmp_path / "cache")!r}, "keep", (0.9, 0.05, 0.05), 10_000))
corpus.load(DataConfig("stdlib", "", "", {str(tmp_path / "cache")!r}, "keep", (0.9, 0.05, 0.05), 10_000))
print(sorted({{"jax", "tensorflow_datasets", "array_record"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": ""}, "config.data.path is empty"),
        ({"path": "/does/not/exist"}, "'/does/not/exist', which does not exist"),
        ({"path": "FOLDER"}, "a folder without files"),
        ({"path": "SHORT"}, "The dev part of files has 0 bytes"),
        ({"path": "SHORT", "archive": "x.zip"}, "config.data.archive is 'x.zip', but config.data.source is files"),
        ({"source": "stdlib", "path": "x"}, "config.data.path is 'x', but config.data.source is stdlib"),
        ({"source": "enwik8", "max_bytes": 5}, "config.data.max_bytes is 5, but config.data.source is enwik8"),
        ({"source": "text8", "splits": (0.8, 0.1, 0.1)}, "text8 has the fixed splits (0.9, 0.05, 0.05)"),
    ],
)
def test_user_errors_say_what_to_do(tmp_path, fields, message):
    (tmp_path / "folder" / ".hidden").mkdir(parents=True)
    (tmp_path / "short").write_bytes(b"abc")
    paths = {"FOLDER": str(tmp_path / "folder"), "SHORT": str(tmp_path / "short")}
    fields["path"] = paths.get(fields.get("path", ""), fields.get("path", ""))
    with pytest.raises(UserError, match=re.escape(message)):
        corpus.load(data(directory=str(tmp_path / "cache"), **fields))


def test_one_byte_is_not_one_bytes(tmp_path):
    with pytest.raises(UserError, match="part of files has 1 byte, but needs at least 2"):
        load_text(tmp_path, b"abcdefghijklmnopqrst")
