"""Where a run is stored: a folder, or object storage (`gs://bucket/run`). Only this file knows the difference.

A folder is a `pathlib.Path`. A location in a bucket is an `epath.Path`, which has all methods used here; for folders it
lacks some. How a bucket differs:

    writing an object is atomic: no write-then-rename, no fsync
    folders are only name prefixes: they need not be created and cannot be renamed atomically
    objects cannot be appended to: a growing file is kept on this machine and uploaded as a whole (`Staged`)
    there are no locks, and space is not limited
"""

import contextlib
import importlib.util
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime.command_line import install_command

_BUCKETS = "gs://"

# Environment variables that the program sets before it opens a bucket, so that only the tested code path is used: not
# TensorFlow if that is installed, nor gcsfs's experimental features.
ENVIRONMENT = {"EPATH_USE_TF": "no", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "no"}
_CLIENTS = ("gcsfs", "aiohttp", "google")


def place(name: str | Path) -> Path:
    """The path of a folder, or of a location in a bucket."""
    text = str(name)
    if "://" not in text:
        return Path(name)
    bucket = text.removeprefix(_BUCKETS).partition("/")[0]
    if not text.startswith(_BUCKETS) or not bucket:
        raise UserError(f"{text} is not a valid workdir; use a folder or gs://BUCKET/RUN")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{text} is in a bucket, which requires gcsfs: run {install_command('gcs')}")
    _client()
    from etils import epath

    found: Any = epath.Path(text)
    return found


def in_bucket(path: Path) -> bool:
    """Whether a path is in a bucket."""
    return not isinstance(path, Path)


def is_failure(error: BaseException) -> bool:
    """Whether an error comes from object storage: the service, the network or the credentials."""
    return type(error).__module__.partition(".")[0] in _CLIENTS


def make_folder(path: Path) -> None:
    """Creates a folder and its parents. A bucket is never created: an unknown one is more likely a typo."""
    if not in_bucket(path):
        path.mkdir(parents=True, exist_ok=True)


def free_bytes(path: Path) -> float:
    """The free space in bytes; infinite in a bucket."""
    return math.inf if in_bucket(path) else shutil.disk_usage(path).free


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically."""
    if in_bucket(path):
        path.write_bytes(content)
        return
    with replacing(path) as new:
        new.write_bytes(content)


@contextlib.contextmanager
def replacing(path: Path, suffix: str = ".new") -> Iterator[Path]:
    """Yields a path beside a local one. What is written there replaces the file at the end, or is deleted on an error.

    Processes that may write at the same time need different suffixes.
    """
    new = path.with_name(path.name + suffix)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def files(folder: Path) -> dict[str, int]:
    """All files below a folder: relative path → size."""
    if not in_bucket(folder):
        found = (path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(found)}
    start = f"{str(folder).removeprefix(_BUCKETS)}/"
    listed = _client().find(start, detail=True)
    return {name.removeprefix(start): about["size"] for name, about in sorted(listed.items())}


def move(folder: Path, target: Path) -> None:
    """Moves a folder: atomically, or in a bucket file by file."""
    if not in_bucket(folder):
        folder.rename(target)
        return
    names = list(files(folder))
    _client().mv([str(folder / name) for name in names], [str(target / name) for name in names])


def delete(folder: Path, as_far_as_possible: bool = False) -> None:
    """Deletes a folder and everything in it."""
    if not in_bucket(folder):
        shutil.rmtree(folder, ignore_errors=as_far_as_possible)
    elif names := list(files(folder)):
        _client().rm([str(folder / name) for name in names])


class Staged:
    """A local folder for growing files, which are uploaded if the workdir is in a bucket."""

    def __init__(self, workdir: Path, names: Iterable[str]):
        """`names`: existing files to append to."""
        self._workdir = workdir
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._stored: dict[str, int] = {}
        self.folder = workdir
        if in_bucket(workdir):
            self._temporary = tempfile.TemporaryDirectory(prefix="adaptive_span_jax.")
            self.folder = Path(self._temporary.name)
            for name in names:
                if (workdir / name).exists():
                    (self.folder / name).write_bytes((workdir / name).read_bytes())

    def store(self) -> None:
        """Uploads the files that have grown."""
        if self._temporary is None:
            return
        for name, size in files(self.folder).items():
            if self._stored.get(name) != size:
                (self._workdir / name).write_bytes((self.folder / name).read_bytes())
                self._stored[name] = size

    def close(self) -> None:
        """Uploads the rest and removes the folder."""
        if self._temporary is not None:
            self.store()
            self._temporary.cleanup()


def _client() -> Any:
    """gcsfs as epath uses it, without its listing cache, because Orbax writes to the bucket as well."""
    import fsspec

    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs")
