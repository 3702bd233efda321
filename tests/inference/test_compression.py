"""Compression with the model's probabilities: its size, arbitrary bytes, damage."""

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

import adaptive_span_jax
from adaptive_span_jax.commands import compress, decompress
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference import codec
from tests.inference.conftest import TEXT

pytestmark = pytest.mark.xdist_group("finished")  # one run serves all files of this folder
HEADER_AND_TRAILER = 44  # bytes


def streamed_bits(model, text, streams):
    """What the model says that a text costs, cut as the compressor cuts it."""
    parts = np.array_split(np.frombuffer(text, np.uint8), streams)
    return sum(8 - model.logprobs(part.tobytes()).sum(dtype=np.float64) / math.log(2) for part in parts)


def test_compression_costs_what_the_model_says(model, monkeypatch):
    text = b"".join(TEXT[i:] for i in range(len(TEXT) - 1, 0, -7))[:6001]
    monkeypatch.setattr(codec, "_BYTES_PER_STREAM", 3000)
    packed = codec.pack(model, text)
    assert codec.check(packed, "it").streams == 2
    assert_allclose(8 * (len(packed) - HEADER_AND_TRAILER), streamed_bits(model, text, 2), rtol=0.01)
    assert packed == codec.pack(model, text)
    assert codec.unpack(model, packed, "it") == text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"d",
        b"\xff",
        TEXT[:100] + b"\x00\xfe" + TEXT[:30] + b"\xff\xff",
        np.random.default_rng(0).bytes(300),
        bytes(200) + TEXT,
    ],
    ids=["empty", "one", "one unknown", "some unknown", "random", "many unknown"],
)
def test_any_bytes_come_back(model, text):
    packed = codec.pack(model, text)
    assert len(packed) <= len(text) + HEADER_AND_TRAILER
    assert codec.unpack(model, packed, "it") == text


def test_damage_and_other_models_are_refused(model, run):
    packed = codec.pack(model, TEXT)
    for place in (0, 6, 7, 20, 30, 40, 60, len(packed) - 1):
        damaged = bytearray(packed)
        damaged[place] ^= 4
        with pytest.raises(UserError, match=r"it (is damaged|was not written by|has format)"):
            codec.unpack(model, bytes(damaged), "it")
    with pytest.raises(UserError, match="it is damaged"):
        codec.unpack(model, packed[:-9], "it")
    with pytest.raises(UserError, match=r"compressed by model \w+, but this is model \w+ \(step 30\)"):
        codec.unpack(adaptive_span_jax.load(run, 30), packed, "it")


def test_files_are_compressed_and_restored(loaded, run, tmp_path, capsys):
    source = tmp_path / "text"
    source.write_bytes(TEXT)
    assert compress.compress(run, "latest", source, None) == 0
    with pytest.raises(UserError, match="text already exists"):
        decompress.decompress(run, "latest", tmp_path / "text.adspan", None)
    with pytest.raises(UserError, match="adspan already exists"):
        compress.compress(run, "latest", source, None)
    assert decompress.decompress(run, "latest", tmp_path / "text.adspan", tmp_path / "again") == 0
    assert (tmp_path / "again").read_bytes() == TEXT
    printed = capsys.readouterr().out
    assert "bits per byte" in printed
    restore = f"main.py --workdir={run} --mode=decompress --step=60 --input={tmp_path}/text.adspan\n"
    assert restore in printed
    assert compress.compress(run, "latest", source, tmp_path / "packed") == 0
    restore = f"main.py --workdir={run} --mode=decompress --step=60 --input={tmp_path}/packed --output={source}\n"
    assert restore in capsys.readouterr().out
    with pytest.raises(UserError, match="--input=nowhere cannot be read"):
        compress.compress(run, "latest", Path("nowhere"), None)
