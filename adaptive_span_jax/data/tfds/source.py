"""A published archive: its URL, its download, and the verification of its content."""

import dataclasses
import hashlib
import http.client
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from adaptive_span_jax.data.text_files import unpacked
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import storage
from adaptive_span_jax.runtime.terminal import counted

ATTEMPTS = 4
FIRST_WAIT_SECONDS = 1.0  # doubled after every failed attempt
TIMEOUT_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Source:
    """URL, size and hash of a published zip file and of the text inside it."""

    name: str
    url: str
    zip_bytes: int
    zip_sha256: str
    text_bytes: int
    text_sha256: str

    @property
    def advice(self) -> str:
        """The advice for a user without a valid copy."""
        return (
            f"Download {self.url} ({self.zip_bytes:,} bytes, SHA-256 {self.zip_sha256}) on another machine "
            f"and pass the file with --config.data.archive=PATH/{self.name}.zip"
        )


def downloaded(source: Source, folder: Path) -> Path:
    """The archive in `folder`, downloaded if it does not exist; it gets its name only after verification."""
    path = folder / f"{source.name}.zip"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    # A unique suffix: without a lock, several processes may download at the same time.
    with storage.replacing(path, f".{uuid.uuid4().hex}.part") as partial:
        partial.touch()
        _fetch_with_retries(source, partial, path)
        what = f"The file from {source.url}"
        _check(source, what, partial.read_bytes(), source.zip_bytes, source.zip_sha256)
    return path


def checked_text(source: Source, path: Path) -> bytes:
    """The text of a local copy, plain or as .zip, .gz, .bz2 or .xz. Its own hash is checked, not the archive's."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; pass the file: --config.data.archive={path / source.name}.zip")
    if not path.is_file():
        raise UserError(f"{path} does not exist. {source.advice}")
    try:
        text = unpacked(path)
    except UserError as error:
        packed = path.read_bytes()
        raise UserError(
            f"{error}. Expected {source.text_bytes:,} bytes with SHA-256 {source.text_sha256} after decompression; the "
            f"file has {counted(len(packed), 'byte')} with SHA-256 {hashlib.sha256(packed).hexdigest()} and cannot be "
            f"decompressed. {source.advice}"
        ) from error
    _check(source, f"The text in {path}", text, source.text_bytes, source.text_sha256)
    return text


def _check(source: Source, what: str, content: bytes, expected_bytes: int, expected_sha256: str) -> None:
    actual = hashlib.sha256(content).hexdigest()
    if (len(content), actual) != (expected_bytes, expected_sha256):
        raise UserError(
            f"{what} is not {source.name}: expected {expected_bytes:,} bytes with SHA-256 {expected_sha256}, "
            f"got {counted(len(content), 'byte')} with SHA-256 {actual}. {source.advice}"
        )


def _fetch_with_retries(source: Source, partial: Path, path: Path) -> None:
    console = Console(stderr=True, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console) as progress:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return _fetch(source, partial, progress)
            except (OSError, http.client.HTTPException) as error:
                cause = error.reason if isinstance(error, urllib.error.URLError) else error
                reason = str(error if isinstance(error, urllib.error.HTTPError) else cause) or type(error).__name__
                final = attempt == ATTEMPTS
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    final = final or error.code < 500  # retrying does not help against "not found"
            if final:
                raise UserError(
                    f"{source.name} could not be downloaded from {source.url}: {reason} (attempt {attempt} of "
                    f"{ATTEMPTS}). {source.advice}, or save it as {path}"
                )
            wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
            console.print(f"Download interrupted: {reason}. Attempt {attempt + 1} of {ATTEMPTS} in {wait:g} s.")
            time.sleep(wait)


def _fetch(source: Source, partial: Path, progress: Progress) -> None:
    have = partial.stat().st_size
    request = urllib.request.Request(source.url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:  # the server ignored the range and sends the whole file
            have = 0
        promised = have + int(response.headers.get("Content-Length", 0))
        task = progress.add_task(f"Downloading {source.name}", total=promised or source.zip_bytes, completed=have)
        with partial.open("ab" if have else "wb") as file:
            while block := response.read(2**16):
                have += file.write(block)
                progress.update(task, completed=have)
    if have < promised:  # `read` does not raise when the connection is closed early
        raise ConnectionError(f"connection closed after {have:,} of {promised:,} bytes")
