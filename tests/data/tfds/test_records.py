"""The published corpora: splits, symbols, ids, and records as TFDS writes and reads them."""

import re

import numpy as np
import pytest

from adaptive_span_jax.data import corpus
from adaptive_span_jax.data.tfds import builder, prepared
from adaptive_span_jax.data.tfds.enwik8 import Enwik8
from adaptive_span_jax.data.tfds.text8 import Text8
from adaptive_span_jax.errors import UserError
from tests.support.published_texts import data, enwik8_text, source_of, text8_text


def test_the_published_facts_are_those_of_100_million_bytes(monkeypatch):
    monkeypatch.undo()
    for cls in (Enwik8, Text8):
        assert cls.SOURCE.text_bytes == 100_000_000
        assert cls.SOURCE.url == f"http://mattmahoney.net/dc/{cls.SOURCE.name}.zip"
        assert re.fullmatch("[0-9a-f]{64} [0-9a-f]{64}", f"{cls.SOURCE.zip_sha256} {cls.SOURCE.text_sha256}")


def test_enwik8_is_the_raw_bytes(tmp_path):
    loaded = corpus.load(data(tmp_path / "cache", archive=tmp_path / "enwik8.zip"))
    text = enwik8_text()
    assert (loaded.name, loaded.unit, len(loaded.vocabulary)) == ("enwik8", "byte", 205)
    assert b"".join(loaded.vocabulary) == bytes(range(214, 9, -1))  # order of first appearance
    assert loaded.decode(loaded.train) == text[:18_009]
    assert loaded.decode(loaded.dev) == text[18_009:19_010]
    assert loaded.decode(loaded.test) == text[19_010:]
    assert not loaded.train.flags.writeable


def test_enwik8_without_newlines_has_204_symbols(tmp_path):
    loaded = corpus.load(data(tmp_path / "cache", archive=tmp_path / "enwik8.zip", newlines="drop"))
    assert len(loaded.vocabulary) == 204
    assert loaded.decode(loaded.dev) == enwik8_text()[18_009:19_010].replace(b"\n", b"")  # split first, then dropped


def test_text8_is_stripped_and_ended_as_published(tmp_path):
    text = text8_text()
    loaded = corpus.load(data(tmp_path / "cache", "text8", tmp_path / "text8.zip"))
    assert (loaded.unit, len(loaded.vocabulary)) == ("character", 28)
    assert b"".join(loaded.vocabulary[:26]) == b"zyxwvutsrqponmlkjihgfedcba"
    assert loaded.vocabulary[26:] == (b" ", b"\n")
    for ids, part in zip(
        (loaded.train, loaded.dev, loaded.test), (text[:18_000], text[18_000:19_000], text[19_000:]), strict=True
    ):
        assert loaded.decode(ids[:-1]) == part.strip(b" ")
        assert ids[-1] == 27
        assert np.count_nonzero(ids == 27) == 1


def test_the_builder_is_a_tfds_dataset_and_we_read_what_tfds_reads(tmp_path):
    built = Enwik8(data_dir=tmp_path / "cache", archive=str(tmp_path / "enwik8.zip"))
    built.download_and_prepare()
    assert built.info.full_name == "enwik8/1.0.0"
    assert "205" in built.info.description
    assert "mahoney2006" in built.info.citation
    records = {name: [record["text"] for record in built.as_data_source(name)] for name in prepared.SPLITS}
    assert [len(record) for record in records["train"]] == [1000] * 18 + [9]
    ours = prepared.read("enwik8", tmp_path / "cache")
    assert [b"".join(records[name]) for name in prepared.SPLITS] == list(ours)


@pytest.mark.parametrize("size", [127, 128, 16_383, 16_400, 2**20])
def test_records_of_any_length_are_read(tmp_path, monkeypatch, size):  # the length field grows at 128 and 16,384
    text = enwik8_text() * 4
    monkeypatch.setattr(Enwik8, "SOURCE", source_of("enwik8", text))
    monkeypatch.setattr(builder, "RECORD_BYTES", size)
    (tmp_path / "enwik8").write_bytes(text)
    prepared.prepare("enwik8", tmp_path / "cache", str(tmp_path / "enwik8"))
    assert b"".join(prepared.read("enwik8", tmp_path / "cache")) == text


def test_damaged_records_are_noticed(tmp_path):
    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    corpus.prepare(config)
    [shard] = (tmp_path / "cache" / "enwik8" / "1.0.0").glob("enwik8-train*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 3000] = bytes(3000)
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"enwik8 in .*1\.0\.0 is damaged.* Delete that folder"):
        corpus.load(config)
    shard.rename(shard.with_name("enwik8-train.array_record-00000-of-00002"))
    with pytest.raises(UserError, match=r"1\.0\.0 is damaged: incomplete: only 1 file named .* Delete that folder"):
        corpus.load(config)


def test_a_vocabulary_of_another_size_is_refused(tmp_path, monkeypatch):
    text = enwik8_text().replace(b"a", b"b")
    monkeypatch.setattr(Enwik8, "SOURCE", source_of("enwik8", text))
    (tmp_path / "enwik8").write_bytes(text)
    with pytest.raises(UserError, match="has 204 symbols instead of the published 205"):
        corpus.load(data(tmp_path / "cache", archive=tmp_path / "enwik8"))
