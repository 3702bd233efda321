"""Small texts, zips and sources with the layout of the published ones."""

import hashlib
import io
import random
import zipfile
from pathlib import Path

from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.data.tfds.source import Source


def data(directory: Path, name: str = "enwik8", archive: Path | str = "", newlines: str = "keep") -> DataConfig:
    return DataConfig(name, "", str(archive), str(directory), newlines, (0.9, 0.05, 0.05), 0)


def enwik8_text() -> bytes:
    """20,011 bytes with exactly 205 different values, all of them in train, newline among them."""
    symbols = bytes(range(10, 215))
    return bytes(reversed(symbols)) + bytes(random.Random(0).choices(symbols, k=20_011 - 205))


def text8_text() -> bytes:
    """20,000 characters, a to z and space, with spaces at the start and end of all three parts."""
    text = bytearray(random.Random(1).choices(b" abcdefghijklmnopqrstuvwxyz", k=20_000))
    text[:28] = b"  zyxwvutsrqponmlkjihgfedcba"
    text[17_999:18_002] = text[18_998:19_001] = b"   "
    text[19_998:] = b"  "
    return bytes(text)


def zipped(name: str, text: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        # A fixed date: with the time of day in it, the same text would have another hash two seconds later.
        archive.writestr(zipfile.ZipInfo(name, (2006, 3, 3, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    return file.getvalue()


def source_of(name: str, text: bytes, url: str = "http://127.0.0.1:9/nobody-listens-here.zip") -> Source:
    archive = zipped(name, text)
    hashes = [hashlib.sha256(content).hexdigest() for content in (archive, text)]
    return Source(name, url, len(archive), hashes[0], len(text), hashes[1])


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
