"""Folders that are whole or not there: written under another name, hashed, pushed to the disk, and only then renamed.

    1000               sealed. SHA256SUMS in it lists every file; `cd 1000 && sha256sum -c SHA256SUMS` checks it by hand
    1200.unfinished    being written, or left by a process that was killed: nobody was told that it is saved
    800.deleting       being deleted, or left by a process that was killed while deleting
    damaged/1000       set aside by a later process that found it damaged or unfinished; never deleted by us

A rename is all or nothing, so a kill at any moment leaves a folder under one of these names and never a sealed one that
is incomplete. What changes on the disk afterwards, a flipped bit or a lost file, shows in the hashes.
"""

import concurrent.futures
import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from adaptive_span_jax.errors import UserError

SUMS = "SHA256SUMS"
DAMAGED = "damaged"
_UNFINISHED = ".unfinished"
_DELETING = ".deleting"


def sealed_steps(directory: Path) -> list[int]:
    """The numbers of the sealed folders, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())


def unfinished(directory: Path, step: int) -> Path:
    """Where a folder is written before it is sealed."""
    return directory / f"{step}{_UNFINISHED}"


def leftovers(directory: Path) -> list[Path]:
    """What is being written now, or was when a process was killed; orbax adds endings of its own to the name."""
    return sorted(directory.glob(f"*{_UNFINISHED}*"))


def seal(directory: Path, step: int) -> None:
    """Hashes an unfinished folder and gives it its name. When this returns it is on the disk, a power cut included."""
    folder = unfinished(directory, step)
    files = _files(folder)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = list(pool.map(lambda path: _sum(path, push=True), files))
    lines = [f"{digest}  {path.relative_to(folder)}\n" for path, digest in zip(files, sums, strict=True)]
    (folder / SUMS).write_text("".join(lines))
    for path in (folder / SUMS, *(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
        _push(path)
    folder.rename(directory / str(step))
    _push(directory)


def find_damage(folder: Path, on_progress: Callable[[float], None] = lambda share: None) -> str | None:
    """What is wrong with a sealed folder, or None. `on_progress` hears which share of its bytes was read."""
    try:
        *lines, _ = (folder / SUMS).read_bytes().decode().split("\n")
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except FileNotFoundError:
        return f"{SUMS} is missing"
    except ValueError:
        return f"{SUMS} cannot be understood"
    if not expected:
        return f"{SUMS} is empty"
    files = {str(path.relative_to(folder)): path for path in _files(folder)}
    for name in sorted({*expected, *files} - {SUMS}):
        if name not in files:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is not in {SUMS}"
    sizes = {name: files[name].stat().st_size for name in expected}
    total, done = max(sum(sizes.values()), 1), 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, found in zip(expected, pool.map(lambda name: _sum(files[name]), expected), strict=True):
            if found is None:
                return f"{name} cannot be read from the disk"
            if found != expected[name]:
                return f"{name} is not what was written: its SHA-256 was {expected[name][:12]}…, now {found[:12]}…"
            done += sizes[name]
            on_progress(done / total)
    return None


def set_aside(folder: Path) -> Path:
    """Moves a folder into `damaged` beside it, under a name that is free; answers where to."""
    place = folder.parent / DAMAGED
    place.mkdir(exist_ok=True)
    number, target = 1, place / folder.name
    while target.exists():
        number += 1
        target = place / f"{folder.name}.{number}"
    return folder.rename(target)


def delete(directory: Path, step: int) -> None:
    """Deletes a sealed folder; killed on the way, it does not look like a damaged one."""
    dying = directory / f"{step}{_DELETING}"
    (directory / str(step)).rename(dying)
    shutil.rmtree(dying)


def finish_deleting(directory: Path) -> None:
    """Deletes what a killed process was deleting."""
    for dying in directory.glob(f"*{_DELETING}"):
        shutil.rmtree(dying)


def bytes_in(folder: Path) -> int:
    """What a folder's files take."""
    return sum(path.stat().st_size for path in _files(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sum(path: Path, push: bool = False) -> str | None:
    """A file's SHA-256; None where the disk cannot give it back. `push`: see that it is on the disk."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if push:
                os.fsync(file)
            return digest
    except OSError as error:
        if push:
            raise
        if error.errno == errno.EIO:
            return None
        # No permission, or the network is down: that says nothing about the content.
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable and try again") from error


def _push(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot push a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
