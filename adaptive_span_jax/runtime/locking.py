"""One process at a time: a lock file that the system frees when its holder ends, however it ends."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Held(Exception):
    """Another process has the lock; the message says which one."""


@contextlib.contextmanager
def hold(path: Path, wait: bool) -> Iterator[bool]:
    """Holds the lock on a file, with host and process in it for people to read; gives False where there are no locks.

    If another process has it: waits, or raises Held.
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
    """Where there are no locks: this process's name, left there until it ends in order; gives the name found before."""
    found = path.read_text().strip() if path.exists() else ""
    path.write_text(_name())
    try:
        yield found
    finally:
        with contextlib.suppress(Exception):  # a name that stays behind costs a warning only
            path.unlink()


def _name() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}\n"
