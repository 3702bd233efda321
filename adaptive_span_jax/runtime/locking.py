"""A lock file for one process at a time; the system releases it when the process ends, however it ends."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Held(Exception):
    """Another process holds the lock; the message names it."""


@contextlib.contextmanager
def hold(path: Path, wait: bool) -> Iterator[bool]:
    """Holds the lock on a file and writes the host and process into it; yields False if locks are not supported.

    If another process holds it: waits, or raises Held.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            alone = True
        except BlockingIOError as error:
            file.seek(0)
            raise Held(file.read().strip() or "another process") from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            alone = False
        if alone:
            file.truncate(0)
            file.write(_name())
            file.flush()
        yield alone


@contextlib.contextmanager
def tag(path: Path) -> Iterator[str]:
    """For buckets, which have no locks: writes this process's name, deletes it at the end; yields the previous name."""
    found = path.read_text().strip() if path.exists() else ""
    path.write_text(_name())
    try:
        yield found
    finally:
        with contextlib.suppress(Exception):  # a leftover name only causes a warning
            path.unlink()


def _name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}\n"
