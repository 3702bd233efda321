"""A published archive: where it is, how it is fetched, and proof that it is the right one."""

import dataclasses
import hashlib
import http.client
import os
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from adaptive_span_jax.data.text_files import unpacked
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime.terminal import counted

ATTEMPTS = 4
FIRST_WAIT_SECONDS = 1.0  # doubled after every failed attempt
TIMEOUT_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Source:
    """The facts about a published zip file and the one text inside it."""

    name: str
    url: str
    zip_bytes: int
    zip_sha256: str
    text_bytes: int
    text_sha256: str

    @property
    def advice(self) -> str:
        """What a user without a good copy should do."""
        return (
            f"Fetch {self.url} ({self.zip_bytes:,} bytes, SHA-256 {self.zip_sha256}) on a machine that can, "
            f"and name the file here with --config.data.archive=PATH/{self.name}.zip"
        )


def downloaded(source: Source, folder: Path) -> Path:
    """The archive in `folder`, downloaded if it is not there; it gets its name only once it is checked."""
    path = folder / f"{source.name}.zip"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=folder)
    os.close(descriptor)
    partial = Path(name)
    try:
        _fetch_patiently(source, partial, path)
        _check(source, f"What {source.url} sent", partial.read_bytes(), source.zip_bytes, source.zip_sha256)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def checked_text(source: Source, path: Path) -> bytes:
    """The text in a local copy, plain or as .zip, .gz, .bz2 or .xz. Its own hash decides, not that of the archive."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; name the file: --config.data.archive={path / source.name}.zip")
    if not path.is_file():
        raise UserError(f"There is no file {path}. {source.advice}")
    try:
        text = unpacked(path)
    except UserError as error:
        packed = path.read_bytes()
        raise UserError(
            f"{error} Expected {source.text_bytes:,} bytes with SHA-256 {source.text_sha256} once unpacked, found "
            f"{counted(len(packed), 'byte')} with SHA-256 {hashlib.sha256(packed).hexdigest()} that cannot be unpacked"
            f". {source.advice}"
        ) from error
    _check(source, f"The text in {path}", text, source.text_bytes, source.text_sha256)
    return text


def _check(source: Source, what: str, content: bytes, expected_bytes: int, expected_sha256: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if (len(content), found) != (expected_bytes, expected_sha256):
        raise UserError(
            f"{what} is not {source.name}: expected {expected_bytes:,} bytes with SHA-256 {expected_sha256}, "
            f"found {counted(len(content), 'byte')} with SHA-256 {found}. {source.advice}"
        )


def _fetch_patiently(source: Source, partial: Path, path: Path) -> None:
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
                    final = final or error.code < 500  # "not found" will not become "found" by asking again
            if final:
                raise UserError(
                    f"{source.name} could not be downloaded from {source.url}: {reason} (attempt {attempt} of "
                    f"{ATTEMPTS}). {source.advice}, or put it at {path}"
                )
            wait = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
            console.print(f"Download interrupted: {reason}. Attempt {attempt + 1} of {ATTEMPTS} in {wait:g} s.")
            time.sleep(wait)


def _fetch(source: Source, partial: Path, progress: Progress) -> None:
    have = partial.stat().st_size
    request = urllib.request.Request(source.url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:  # the server starts over, so we do
            have = 0
        promised = have + int(response.headers.get("Content-Length", 0))
        task = progress.add_task(f"Downloading {source.name}", total=promised or source.zip_bytes, completed=have)
        with partial.open("ab" if have else "wb") as file:
            while block := response.read(2**16):
                have += file.write(block)
                progress.update(task, completed=have)
    if have < promised:  # `read` does not complain when the other side hangs up early
        raise ConnectionError(f"the connection ended after {have:,} of {promised:,} bytes")
