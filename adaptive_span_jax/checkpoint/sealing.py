"""Atomic folders: written under another name, hashed, fsynced, and only then renamed.

    1000               sealed. SHA256SUMS in it lists every file; verify it with `cd 1000 && sha256sum -c SHA256SUMS`
    1200.unfinished    being written, or left by a killed process; never reported as saved, so deleted at the next start
    800.deleting       being deleted, or left by a process that was killed while deleting it
    damaged/1000       was sealed and later found to be damaged; never deleted by the program

A rename is atomic, so a kill at any moment leaves a folder under one of these names, and never a sealed folder that is
incomplete. Later changes on disk, such as a flipped bit or a lost file, are detected by the hashes.

A bucket has no atomic rename. There a folder has its number from the start, and an empty marker object beside it gives
its state: `1200.unfinished` is created before anything of 1200 is written and deleted when everything is written and
hashed; `800.deleting` is created before anything of 800 is deleted. A number with a marker beside it is not sealed.
"""

import concurrent.futures
import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import storage

SUMS = "SHA256SUMS"
DAMAGED = "damaged"
_UNFINISHED = ".unfinished"
_DELETING = ".deleting"


def sealed_steps(directory: Path) -> list[int]:
    """The numbers of the sealed folders, ascending."""
    if not directory.is_dir():
        return []
    names = {entry.name for entry in directory.iterdir()}
    if storage.in_bucket(directory):
        names -= {name.removesuffix(mark) for mark in (_UNFINISHED, _DELETING) for name in names if name.endswith(mark)}
    return sorted(int(name) for name in names if name.isdecimal())


def unfinished(directory: Path, step: int) -> Path:
    """The path at which a folder is written before it is sealed."""
    return _content(directory / f"{step}{_UNFINISHED}")


def begin(directory: Path, step: int) -> None:
    """Call this before anything is written: in a bucket, it marks the folder as unfinished."""
    if not storage.in_bucket(directory):
        return
    if step in sealed_steps(directory):
        raise FileExistsError(f"{directory / str(step)} already exists")
    (directory / f"{step}{_UNFINISHED}").write_bytes(b"")
    # The last request of a killed process may have completed after its folder was deleted.
    storage.delete(directory / str(step))


def leftovers(directory: Path) -> list[Path]:
    """Folders that are being written, or were when a process was killed. Orbax appends its own suffixes to the name."""
    return sorted(directory.glob(f"*{_UNFINISHED}*"))


def seal(directory: Path, step: int) -> None:
    """Hashes an unfinished folder and renames it. Afterward it survives even a power cut."""
    folder = unfinished(directory, step)
    names = list(storage.files(folder))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = list(pool.map(lambda name: _sum(folder / name, fsync=True), names))
    lines = [f"{digest}  {name}\n" for name, digest in zip(names, sums, strict=True)]
    (folder / SUMS).write_text("".join(lines))
    if storage.in_bucket(directory):
        (directory / f"{step}{_UNFINISHED}").unlink()
        return
    for path in (folder / SUMS, *(entry for entry in folder.rglob("*") if entry.is_dir()), folder):
        _fsync(path)
    folder.rename(directory / str(step))
    _fsync(directory)


def find_damage(folder: Path, on_progress: Callable[[float], None] = lambda share: None) -> str | None:
    """The damage to a sealed folder in words, or None. `on_progress` is called with the fraction of bytes read."""
    try:
        *lines, _ = (folder / SUMS).read_bytes().decode().split("\n")
        expected = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except FileNotFoundError:
        return f"{SUMS} is missing"
    except ValueError:
        return f"{SUMS} is malformed"
    if not expected:
        return f"{SUMS} is empty"
    sizes = storage.files(folder)
    for name in sorted({*expected, *sizes} - {SUMS}):
        if name not in sizes:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is not in {SUMS}"
    total, done = max(sum(sizes[name] for name in expected), 1), 0
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, found in zip(expected, pool.map(lambda name: _sum(folder / name), expected), strict=True):
            if found is None:
                return f"{name} cannot be read from disk"
            if found != expected[name]:
                return f"{name} has changed: its SHA-256 was {expected[name][:12]}… and is now {found[:12]}…"
            done += sizes[name]
            on_progress(done / total)
    return None


def set_aside(folder: Path) -> Path:
    """Moves a folder into `damaged/` beside it, under an unused name; returns the new path."""
    place = folder.parent / DAMAGED
    storage.make_folder(place)
    number, target = 1, place / folder.name
    while target.exists():
        number += 1
        target = place / f"{folder.name}.{number}"
    storage.move(_content(folder), target)
    _unmark(folder)
    return target


def delete(directory: Path, step: int) -> None:
    """Deletes a sealed folder such that, after a kill, the rest does not look like a damaged checkpoint."""
    dying = directory / f"{step}{_DELETING}"
    if storage.in_bucket(directory):
        dying.write_bytes(b"")
    else:
        (directory / str(step)).rename(dying)
    discard(dying)


def discard(folder: Path, as_far_as_possible: bool = False) -> None:
    """Deletes a folder that is not sealed."""
    storage.delete(_content(folder), as_far_as_possible)
    _unmark(folder)


def finish_deleting(directory: Path) -> None:
    """Completes the deletions of a killed process."""
    for dying in directory.glob(f"*{_DELETING}"):
        discard(dying)


def bytes_in(folder: Path) -> int:
    """The total size of a folder's files."""
    return sum(storage.files(folder).values())


def _content(folder: Path) -> Path:
    """The path of the files of an unfinished or dying folder: in a bucket, beside its marker."""
    if storage.in_bucket(folder) and folder.name.endswith((_UNFINISHED, _DELETING)):
        return folder.with_name(folder.name.partition(".")[0])
    return folder


def _unmark(folder: Path) -> None:
    if _content(folder) != folder:
        folder.unlink()


def _sum(path: Path, fsync: bool = False) -> str | None:
    """A file's SHA-256; None after a disk read error. `fsync`: also flush the file to disk."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            if fsync and not storage.in_bucket(path):
                os.fsync(file)
            return digest
    except OSError as error:
        if fsync:
            raise
        if error.errno == errno.EIO:
            return None
        # A missing permission or a network failure does not mean that the content is damaged.
        raise UserError(f"{path} cannot be read ({error.strerror or error}); make it readable and try again") from error


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot fsync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
