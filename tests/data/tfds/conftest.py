"""Small texts in place of the real ones, for all tests of this folder."""

import pytest

from adaptive_span_jax.data.tfds import builder, source
from adaptive_span_jax.data.tfds.enwik8 import Enwik8
from adaptive_span_jax.data.tfds.text8 import Text8
from tests.support.published_texts import enwik8_text, source_of, text8_text, zipped


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Small texts instead of the real ones, small records so that there are several, and no outside network."""
    monkeypatch.setattr(builder, "RECORD_BYTES", 1000)
    monkeypatch.setattr(source, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # TFDS leaves an empty folder there for every builder
    for cls, text in ((Enwik8, enwik8_text()), (Text8, text8_text())):
        name = cls.__name__.lower()
        monkeypatch.setattr(cls, "SOURCE", source_of(name, text))
        (tmp_path / f"{name}.zip").write_bytes(zipped(name, text))
