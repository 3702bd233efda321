import bz2
import contextlib
import gzip
import hashlib
import http.server
import io
import lzma
import random
import re
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import numpy.testing as npt
import pytest

from adaptive_span_jax import corpus, lock
from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.datasets import builder, prepared, source
from adaptive_span_jax.datasets.enwik8 import Enwik8
from adaptive_span_jax.datasets.source import Source
from adaptive_span_jax.datasets.text8 import Text8
from adaptive_span_jax.errors import UserError

ROOT = Path(prepared.__file__).parents[2]


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


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


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


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
def test_the_text_itself_will_do_as_archive(tmp_path, suffix):
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix]
    archive = tmp_path / f"enwik8{suffix}"
    archive.write_bytes(pack(enwik8_text()))
    loaded = corpus.load(data(tmp_path / "cache", archive=archive))
    reference = corpus.load(data(tmp_path / "other", archive=tmp_path / "enwik8.zip"))
    assert loaded.fingerprint == reference.fingerprint


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


def test_preparing_twice_does_nothing_and_opening_needs_neither_archive_nor_tfds(tmp_path):
    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    corpus.prepare(config)
    before = {path: (tmp_path / "cache" / path).stat().st_mtime_ns for path in files_in(tmp_path / "cache")}
    (tmp_path / "enwik8.zip").unlink()
    corpus.prepare(config)
    program = f"""
import sys
from adaptive_span_jax import corpus, lock
from adaptive_span_jax.config import DataConfig
print(len(corpus.load({config!r}).train), sorted({{"jax", "tensorflow_datasets"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "18009 []"
    assert before == {path: (tmp_path / "cache" / path).stat().st_mtime_ns for path in files_in(tmp_path / "cache")}


def bad_archives() -> dict[str, tuple[str, bytes]]:
    good = zipped("enwik8", enwik8_text())
    flipped = bytearray(enwik8_text())
    flipped[12_345] ^= 1
    return {
        "truncated zip": ("enwik8.zip", good[:-100]),
        "empty zip": ("enwik8.zip", b""),
        "swapped": ("enwik8.zip", zipped("text8", text8_text())),
        "packed again": ("enwik8.zip", zipped("enwik9", enwik8_text())),
        "flipped plain": ("enwik8", bytes(flipped)),
        "truncated plain": ("enwik8", enwik8_text()[:-1]),
        "flipped gz": ("enwik8.gz", gzip.compress(bytes(flipped))),
        "zip without its suffix": ("enwik8", good),
    }


@pytest.mark.parametrize("case", bad_archives())
def test_a_wrong_archive_is_refused_with_both_hashes_and_leaves_nothing(tmp_path, case):
    name, content = bad_archives()[case]
    archive = tmp_path / name
    archive.write_bytes(content)
    with pytest.raises(UserError) as error:
        corpus.load(data(tmp_path / "cache", archive=archive))
    facts = Enwik8.SOURCE
    found = hashlib.sha256(gzip.decompress(content) if name.endswith(".gz") else content).hexdigest()
    message = str(error.value)
    assert str(archive) in message
    assert (facts.zip_sha256 if name.endswith(".zip") else facts.text_sha256) in message
    assert f"with SHA-256 {found}" in message
    assert f"Fetch {facts.url}" in message
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
    with pytest.raises(UserError, match=f"expected 20,011 bytes with SHA-256 {other}, found .* {facts.text_sha256}"):
        corpus.load(data(tmp_path / "cache", archive=tmp_path / "enwik8.zip"))


def test_a_truncated_gz_says_what_was_expected(tmp_path):
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(enwik8_text())[:-50])
    with pytest.raises(UserError, match=f"enwik8.gz cannot be read: .*{Enwik8.SOURCE.text_sha256}"):
        corpus.load(data(tmp_path / "cache", archive=tmp_path / "enwik8.gz"))
    assert files_in(tmp_path / "cache") == [".enwik8.lock"]


def test_a_missing_archive_is_named(tmp_path):
    with pytest.raises(UserError, match=f"There is no file {tmp_path}/gone.zip. Fetch http"):
        corpus.load(data(tmp_path / "cache", archive=tmp_path / "gone.zip"))


class Server(http.server.ThreadingHTTPServer):
    """Serves one file, with one trouble for each of the first requests."""

    def __init__(self, content: bytes, troubles: list[str], ranges: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.troubles, self.ranges = content, troubles, ranges
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/enwik8.zip"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        server.requests.append(self.headers.get("Range", "all"))
        trouble = server.troubles.pop(0) if server.troubles else ""
        if trouble.isdigit():
            self.send_error(int(trouble))
            return
        start = int(self.headers.get("Range", "bytes=0-")[6:-1]) if server.ranges else 0
        body = server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:5000] if trouble == "hangs up" else body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args  # requests are no part of a test's output


@contextlib.contextmanager
def serving(monkeypatch, content: bytes, troubles: list[str] | None = None, ranges: bool = True):
    with Server(content, troubles or [], ranges) as server:
        monkeypatch.setattr(Enwik8, "SOURCE", source_of("enwik8", enwik8_text(), server.url))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_the_builder_downloads_by_itself(tmp_path, monkeypatch):
    with serving(monkeypatch, zipped("enwik8", enwik8_text())) as server:
        Enwik8(data_dir=tmp_path / "cache").download_and_prepare()
        assert server.requests == ["all"]
    assert b"".join(prepared.read("enwik8", tmp_path / "cache")) == enwik8_text()


@pytest.mark.parametrize(
    ("troubles", "ranges", "requests"),
    [
        ([], True, ["all"]),
        (["hangs up", "hangs up"], True, ["all", "bytes=5000-", "bytes=10000-"]),
        (["hangs up", "hangs up"], False, ["all", "bytes=5000-", "bytes=5000-"]),
        (["503", "hangs up", "500"], True, ["all", "all", "bytes=5000-", "bytes=5000-"]),
    ],
)
def test_a_download_survives_troubles(tmp_path, monkeypatch, capfd, troubles, ranges, requests):
    with serving(monkeypatch, zipped("enwik8", enwik8_text()), list(troubles), ranges) as server:
        loaded = corpus.load(data(tmp_path / "cache"))
        assert server.requests == requests
    assert loaded.decode(loaded.train) == enwik8_text()[:18_009]
    assert [name for name in files_in(tmp_path / "cache") if "downloads" in name] == ["downloads/enwik8.zip"]
    output = capfd.readouterr()
    assert output.err.count("Download interrupted") == len(troubles)
    assert "Downloading enwik8" in output.err
    assert output.out == ""


def test_a_wrong_download_is_refused_at_once(tmp_path, monkeypatch):
    with serving(monkeypatch, b"<html>Please log in to this network</html>") as server:
        with pytest.raises(UserError, match=f"What {server.url} sent is not enwik8: expected .* found 42 bytes"):
            corpus.load(data(tmp_path / "cache"))
        assert server.requests == ["all"]
    assert files_in(tmp_path / "cache") == [".enwik8.lock"]


@pytest.mark.parametrize(
    ("troubles", "attempts"), [(["404"], 1), (["503"] * 9, 4), (["hangs up"] * 2 + ["503"] * 9, 4)]
)
def test_a_download_that_fails_says_what_to_do_and_leaves_nothing(tmp_path, monkeypatch, troubles, attempts):
    with serving(monkeypatch, zipped("enwik8", enwik8_text()), troubles) as server:
        with pytest.raises(UserError, match=f"could not be downloaded from {server.url}: HTTP Error"):
            corpus.load(data(tmp_path / "cache"))
        assert len(server.requests) == attempts
    assert files_in(tmp_path / "cache") == [".enwik8.lock"]


def test_without_network_the_message_says_what_to_fetch_and_where_to_put_it(tmp_path):
    with pytest.raises(UserError) as error:
        corpus.prepare(data(tmp_path / "cache"))
    facts, message = Enwik8.SOURCE, str(error.value)
    assert "refused" in message
    assert f"Fetch {facts.url} ({facts.zip_bytes:,} bytes, SHA-256 {facts.zip_sha256})" in message
    assert "--config.data.archive=PATH/enwik8.zip" in message
    place = tmp_path / "cache" / "downloads" / "enwik8.zip"
    assert f"put it at {place}" in message
    place.write_bytes((tmp_path / "enwik8.zip").read_bytes())  # as told
    assert len(corpus.load(data(tmp_path / "cache")).vocabulary) == 205


SLOW_PREPARATION = """
import sys, time
from adaptive_span_jax import corpus, lock
from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.datasets import builder
from adaptive_span_jax.datasets.enwik8 import Enwik8
from adaptive_span_jax.datasets.source import Source

def slowly(records, *_, **__):
    print("started", file=sys.stderr, flush=True)
    time.sleep({seconds})
    return records

builder.track = slowly
Enwik8.SOURCE = {facts!r}
corpus.prepare({config!r})
print("prepared", file=sys.stderr, flush=True)
"""


def start_preparation(config: DataConfig, seconds: float) -> subprocess.Popen:
    program = SLOW_PREPARATION.format(config=config, seconds=seconds, facts=Enwik8.SOURCE)
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_killed_preparation_starts_over_cleanly(tmp_path):
    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    (tmp_path / "cache" / "downloads").mkdir(parents=True)
    (tmp_path / "cache" / "downloads" / "enwik8.zip.abc.part").write_bytes(b"of a killed download")
    with start_preparation(config, seconds=60) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "started\n"
        process.send_signal(signal.SIGKILL)
    assert list((tmp_path / "cache" / "enwik8").glob("incomplete.*"))
    loaded = corpus.load(config)
    assert loaded.decode(loaded.test) == enwik8_text()[19_010:]
    assert not list((tmp_path / "cache" / "enwik8").glob("incomplete.*"))
    assert not list((tmp_path / "cache" / "downloads").glob("*.part"))


def test_of_two_preparations_at_once_one_waits_for_the_other(tmp_path):
    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    with start_preparation(config, seconds=0.3) as first, start_preparation(config, seconds=0.3) as second:
        outputs = sorted(process.communicate()[1].split() for process in (first, second))
    assert outputs == [["prepared"], ["started", "started", "started", "prepared"]]
    assert len(corpus.load(config).vocabulary) == 205


def test_without_locks_the_one_who_finishes_first_wins(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def no_lock(path, wait):
        del path, wait
        yield False

    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    monkeypatch.setattr(lock, "hold", no_lock)
    generate = Enwik8._generate_examples

    def overtaken(self, split, text):
        monkeypatch.setattr(Enwik8, "_generate_examples", generate)
        corpus.prepare(config)
        return generate(self, split, text)

    monkeypatch.setattr(Enwik8, "_generate_examples", overtaken)
    corpus.prepare(config)
    assert len(corpus.load(config).vocabulary) == 205
    assert not list((tmp_path / "cache" / "enwik8").glob("incomplete.*"))


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
    with pytest.raises(UserError, match=r"1\.0\.0 is damaged: 1 files .* are not all of them.* Delete that folder"):
        corpus.load(config)


def test_a_vocabulary_of_another_size_is_refused(tmp_path, monkeypatch):
    text = enwik8_text().replace(b"a", b"b")
    monkeypatch.setattr(Enwik8, "SOURCE", source_of("enwik8", text))
    (tmp_path / "enwik8").write_bytes(text)
    with pytest.raises(UserError, match="has 204 symbols instead of the published 205"):
        corpus.load(data(tmp_path / "cache", archive=tmp_path / "enwik8"))


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"could not be prepared in .*file/cache.* --config.data.directory=PATH"):
        corpus.prepare(data(tmp_path / "file" / "cache", archive=tmp_path / "enwik8.zip"))


def test_prepared_data_goes_to_the_cache_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus.prepare(DataConfig("enwik8", "", str(tmp_path / "enwik8.zip"), "", "keep", (0.9, 0.05, 0.05), 0))
    assert (tmp_path / "xdg" / "adaptive_span_jax" / "enwik8" / "1.0.0").is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    loaded = corpus.load(DataConfig("enwik8", "", str(tmp_path / "enwik8.zip"), "", "keep", (0.9, 0.05, 0.05), 0))
    assert (tmp_path / "home" / ".cache" / "adaptive_span_jax" / "enwik8" / "1.0.0").is_dir()
    npt.assert_array_equal(loaded.train[:3], [0, 1, 2])
