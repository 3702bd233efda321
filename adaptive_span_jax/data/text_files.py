"""Text as bytes: a file, a folder of files, or the source code of Python's standard library."""

import bz2
import gzip
import lzma
import os
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from adaptive_span_jax.errors import UserError

_OPENERS = {".gz": gzip.GzipFile, ".bz2": bz2.BZ2File, ".xz": lzma.LZMAFile}
# Raised for a file that is truncated, damaged, of another type than its suffix, or (RuntimeError) encrypted.
_UNREADABLE = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)

# Tests contain many unusual bytes, and installed packages are not the library. Names that start with _BUILT_HERE have
# paths of the machine that built this Python, so the text would differ between machines.
_NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
_BUILT_HERE = ("_sysconfigdata", "config-")


def files_under(path: str) -> list[Path]:
    """The file at `path`, or all files below the folder `path` in sorted order, hidden ones left out."""
    if not path:
        raise UserError("config.data.path is empty; set it to a text file or folder with --config.data.path=PATH")
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"config.data.path is {path!r}, which does not exist; set it to a file or folder")
    files = _walk(root, lambda name: not _hidden(name))
    if not files:
        raise UserError(f"config.data.path is {path!r}, a folder without files (hidden files are skipped)")
    return files


def stdlib_folder() -> Path:
    """The folder of Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """The modules of Python's standard library in sorted order, about 12 MB."""
    root = stdlib_folder()
    files = [file for file in _walk(root, _is_library) if file.suffix == ".py"]
    if not files:
        raise UserError(
            f"{root} has no source code of Python's library; set config.data.source=files and config.data.path"
        )
    return files


def read_text(files: Iterable[Path], max_bytes: int = 0) -> bytes:
    """The concatenated bytes of all files; only the first `max_bytes` unless that is 0."""
    pieces = []
    left = max_bytes or -1  # -1 means no limit, as it does for `read`
    for file in files:
        pieces.append(unpacked(file, left))
        if max_bytes:
            left -= len(pieces[-1])
            if left == 0:
                break
    return b"".join(pieces)


def unpacked(path: Path, limit: int = -1) -> bytes:
    """The first `limit` bytes of a file (-1: all), decompressed if its name ends in .gz, .bz2, .xz or .zip."""
    try:
        if path.suffix == ".zip":
            return _unzipped(path, limit)
        opener = _OPENERS.get(path.suffix)
        with opener(path) if opener else path.open("rb") as file:
            return file.read(limit)
    except _UNREADABLE as error:
        raise UserError(f"{path} cannot be read: {error}; check that it is complete and matches its suffix") from error


def _unzipped(path: Path, limit: int) -> bytes:
    pieces = []
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith("/") or any(map(_hidden, name.split("/"))):
                continue
            with archive.open(name) as file:
                pieces.append(file.read(limit if limit < 0 else limit - sum(map(len, pieces))))
    return b"".join(pieces)


def _walk(root: Path, wanted: Callable[[str], bool]) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = filter(wanted, folders)  # do not descend into the others
        files += [Path(folder, name) for name in names if wanted(name)]
    return sorted(file for file in files if file.is_file())


def _hidden(name: str) -> bool:
    return name.startswith((".", "__MACOSX"))  # macOS adds __MACOSX, with copies of metadata, to its archives


def _is_library(name: str) -> bool:
    return name not in _NOT_LIBRARY and not name.startswith(_BUILT_HERE)
