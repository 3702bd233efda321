"""A stand-in for Google Cloud Storage on 127.0.0.1, as much of its JSON API as gcsfs and TensorStore ask for.

Objects are in memory, whole or not there, with generations and the preconditions on them, as Google documents it.
Anything else is answered with 501, and `unknown` remembers it. What it cannot show: real networks, credentials, rate
limits.
"""

import contextlib
import itertools
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

BUCKET = "bucket"


class Stored(NamedTuple):
    """An object: its content, and the number of the write that made it."""

    content: bytes
    generation: int


class ObjectStorage(ThreadingHTTPServer):
    """One bucket. `objects` may be read and changed by the test."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Stored] = {}
        self.unknown: list[str] = []
        self.uploads: dict[str, tuple[str, dict[str, str], bytearray]] = {}
        self.guard = threading.Lock()
        self.count = itertools.count(1)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of connections that a killed process has left."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def environment(self) -> dict[str, str]:
        """What sends gcsfs and TensorStore here."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        }

    def write(self, name: str, content: bytes, query: dict[str, str] | None = None) -> Stored | None:
        """Makes an object; None if a precondition does not hold."""
        with self.guard:
            if not self.allowed(name, query or {}):
                return None
            self.objects[name] = Stored(content, next(self.count))
            return self.objects[name]

    def takes_a_change(self) -> bool:
        """Whether this request may change anything; for tests to replace."""
        return True

    def allowed(self, name: str, query: dict[str, str]) -> bool:
        """Whether the request's precondition on the generation holds; 0 stands for an object that is not there."""
        there = self.objects[name].generation if name in self.objects else 0
        return int(query.get("ifGenerationMatch", there)) == there

    def names(self, under: str = "") -> list[str]:
        """The names of all objects below a folder."""
        return sorted(name for name in list(self.objects) if name.startswith(under))


@contextlib.contextmanager
def running() -> Iterator[ObjectStorage]:
    """The stand-in, for as long as the block lasts."""
    with ObjectStorage() as storage:
        thread = threading.Thread(target=storage.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield storage
        finally:
            storage.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def _storage(self) -> ObjectStorage:
        assert isinstance(self.server, ObjectStorage)
        return self.server

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # it would go to stderr
        pass

    def _answer(self) -> None:
        """Finds out what is asked for; object names arrive quoted, so that a path's parts are apart."""
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = re.sub(r"^(/upload|/download)?/storage/v1", "", url.path)
        if self.command != "GET" and not self._storage.takes_a_change():
            self._send(403)
        elif found := re.fullmatch(rf"/b/{BUCKET}", path):
            self._json({"name": BUCKET, "location": "HERE"})
        elif path.startswith("/b/") and not path.startswith(f"/b/{BUCKET}"):
            self._send(404)
        elif url.path.startswith("/upload") and path == f"/b/{BUCKET}/o":
            self._upload(query, body)
        elif path == f"/b/{BUCKET}/o" and self.command == "GET":
            self._list(query)
        elif found := re.fullmatch(rf"/b/{BUCKET}/o/([^/]+)/moveTo/o/([^/]+)", path):
            self._move(unquote(found[1]), unquote(found[2]))
        elif found := re.fullmatch(rf"/b/{BUCKET}/o/([^/]+)", path):
            self._one(unquote(found[1]), query)
        else:
            self._storage.unknown.append(f"{self.command} {self.path}")
            self._send(501)

    def _upload(self, query: dict[str, str], body: bytes) -> None:
        name = query.get("name", "")
        if query["uploadType"] == "multipart":
            # Two parts after their headers: a JSON object with the name, and the content.
            mark = b"--" + self.headers["Content-Type"].split("boundary=")[1].strip('"').encode()
            head, content = body.split(mark, 2)[1:]
            name = name or json.loads(re.split(rb"\r?\n\r?\n", head, maxsplit=1)[1])["name"]
            body = re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1]
            body = body[: body.rindex(mark)].removesuffix(b"\n").removesuffix(b"\r")
        elif query["uploadType"] == "resumable":
            if "upload_id" not in query:
                key = str(next(self._storage.count))
                self._storage.uploads[key] = (name, query, bytearray())
                self._send(200, headers={"Location": f"{self._storage.url}{self.path}&upload_id={key}"})
                return
            name, query, so_far = self._storage.uploads[query["upload_id"]]
            so_far += body
            if self.headers["Content-Range"].endswith("/*"):  # more to come
                self._send(308, headers={"Range": f"bytes=0-{len(so_far) - 1}"})
                return
            body = bytes(so_far)
        stored = self._storage.write(name, body, query)
        self._json(_about(name, stored)) if stored else self._send(412)

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        items, folders = [], set()
        for name in self._storage.names(prefix):
            stored = self._storage.objects.get(name)
            if stored is None or name < query.get("startOffset", "") or name >= query.get("endOffset", "\U0010ffff"):
                continue
            if delimiter and delimiter in name[len(prefix) :]:
                folders.add(prefix + name[len(prefix) :].split(delimiter)[0] + delimiter)
            else:
                items.append(_about(name, stored))
        self._json({"items": items, "prefixes": sorted(folders)})

    def _move(self, name: str, target: str) -> None:
        with self._storage.guard:
            stored = self._storage.objects.pop(name, None)
            if stored:
                self._storage.objects[target] = Stored(stored.content, next(self._storage.count))
        self._json(_about(target, self._storage.objects[target])) if stored else self._send(404)

    def _one(self, name: str, query: dict[str, str]) -> None:
        with self._storage.guard:
            stored = self._storage.objects.get(name)
            if stored is not None and not self._storage.allowed(name, query):
                self._send(412)
                return
            if self.command == "DELETE":
                self._storage.objects.pop(name, None)
        if stored is None:
            self._send(404)
        elif int(query.get("ifGenerationNotMatch", -1)) == stored.generation:
            self._send(304)
        elif self.command == "DELETE":
            self._send(204)
        elif query.get("alt") == "media":
            self._content(stored)
        else:
            self._json(_about(name, stored))

    def _content(self, stored: Stored) -> None:
        headers = {"x-goog-generation": str(stored.generation)}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            self._send(200, stored.content, headers)
            return
        start, size = int(wanted[1]), len(stored.content)
        end = min(int(wanted[2] or size - 1), size - 1)
        if start > end:
            self._send(416, headers=headers)
            return
        headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        self._send(206, stored.content[start : end + 1], headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _about(name: str, stored: Stored) -> dict[str, str]:
    now = "2026-01-01T00:00:00.000Z"
    about = {"name": name, "bucket": BUCKET, "size": str(len(stored.content)), "generation": str(stored.generation)}
    return about | {"timeCreated": now, "updated": now, "storageClass": "STANDARD", "contentType": "x/y"}
