"""Where a run is kept: a folder, or object storage (`gs://bucket/run`). This is the one file that knows the difference.

A folder is a `pathlib.Path`. A place in a bucket is an `epath.Path`, which has the same methods as far as they are used
here; for folders it would have too few of them. A bucket is different:

    an object is written whole or not at all, and then everybody sees it: nothing to replace, nothing to push to a disk
    folders are only beginnings of names: nothing to make, and nothing to rename at once
    nothing can be appended to: a file that grows is kept on this machine and stored again as a whole (`Staged`)
    there is no lock, and no end of room
"""

import importlib.util
import math
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime.command_line import install_command

_BUCKETS = "gs://"

# What the program sets for itself before it opens a bucket. One way, the one that is tested: not by TensorFlow where
# that is installed, nor by gcsfs's experiments.
ENVIRONMENT = {"EPATH_USE_TF": "no", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "no"}
_CLIENTS = ("gcsfs", "aiohttp", "google")


def place(name: str | Path) -> Path:
    """The folder or place in a bucket that a user names."""
    text = str(name)
    if "://" not in text:
        return Path(name)
    bucket = text.removeprefix(_BUCKETS).partition("/")[0]
    if not text.startswith(_BUCKETS) or not bucket:
        raise UserError(f"{text} is not a valid workdir: name a folder, or gs://BUCKET/RUN")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{text} is in a bucket, which needs gcsfs: {install_command('gcs')}")
    _client()
    from etils import epath

    found: Any = epath.Path(text)
    return found


def in_bucket(path: Path) -> bool:
    """Whether a path is in a bucket."""
    return not isinstance(path, Path)


def is_failure(error: BaseException) -> bool:
    """Whether an error is a bucket's, its network's or its credentials'."""
    return type(error).__module__.partition(".")[0] in _CLIENTS


def make_folder(path: Path) -> None:
    """Makes a folder and those above it. A bucket is never made: its name is more likely a mistake."""
    if not in_bucket(path):
        path.mkdir(parents=True, exist_ok=True)


def free_bytes(path: Path) -> float:
    """How much can still be written."""
    return math.inf if in_bucket(path) else shutil.disk_usage(path).free


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    if in_bucket(path):
        path.write_bytes(content)
        return
    replacement = path.with_name(f"{path.name}.new")
    replacement.write_bytes(content)
    replacement.replace(path)


def files(folder: Path) -> dict[str, int]:
    """All files below a folder, by their names from there on: their sizes."""
    if not in_bucket(folder):
        found = (path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(found)}
    start = f"{str(folder).removeprefix(_BUCKETS)}/"
    listed = _client().find(start, detail=True)
    return {name.removeprefix(start): about["size"] for name, about in sorted(listed.items())}


def move(folder: Path, target: Path) -> None:
    """Moves a folder: at once, or in a bucket file by file."""
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
    """A folder on this machine for files that grow, and their way to the workdir, if that is in a bucket."""

    def __init__(self, workdir: Path, names: Iterable[str]):
        """`names`: the files that are continued."""
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
        """Stores what has grown."""
        if self._temporary is None:
            return
        for name, size in files(self.folder).items():
            if self._stored.get(name) != size:
                (self._workdir / name).write_bytes((self.folder / name).read_bytes())
                self._stored[name] = size

    def close(self) -> None:
        """Stores the rest and removes the folder."""
        if self._temporary is not None:
            self.store()
            self._temporary.cleanup()


def _client() -> Any:
    """gcsfs, as epath uses it: without a memory of what is in a bucket, because orbax writes there besides."""
    import fsspec

    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return fsspec.filesystem("gcs")
