"""The download, from a local server that disconnects, is busy, or sends something else."""

import contextlib
import http.server
import threading

import pytest

from adaptive_span_jax.data import corpus
from adaptive_span_jax.data.tfds import prepared
from adaptive_span_jax.data.tfds.enwik8 import Enwik8
from adaptive_span_jax.errors import UserError
from tests.support.published_texts import data, enwik8_text, files_in, source_of, zipped


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
        with pytest.raises(UserError, match=f"The file from {server.url} is not enwik8: expected .* got 42 bytes"):
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
    assert f"{facts.url}: [Errno 111] Connection refused (attempt 4 of 4)" in message
    assert f"Download {facts.url} ({facts.zip_bytes:,} bytes, SHA-256 {facts.zip_sha256})" in message
    assert "--config.data.archive=PATH/enwik8.zip" in message
    place = tmp_path / "cache" / "downloads" / "enwik8.zip"
    assert f"save it as {place}" in message
    place.write_bytes((tmp_path / "enwik8.zip").read_bytes())  # as told
    assert len(corpus.load(data(tmp_path / "cache")).vocabulary) == 205
