"""Goodput: the share of a run's wall time that was spent in steps that counted.

    wall time    of all processes of the run, each from the start of its program; not the time between processes
    not counted  start-up, including the first step of a process, which compiles; evaluations; saving and waiting for
                 saves; skipped steps; steps that were lost by a kill and repeated

A checkpoint has both sums of its time. A process that resumes from it takes the wall time from the log, which also has
the processes that were killed after the checkpoint, up to their last line.
"""

import contextlib
import time
from collections.abc import Iterator


class Goodput:
    """Adds up the time of a run's steps."""

    def __init__(self, program_started: float, wall_before: float = 0.0, productive_before: float = 0.0) -> None:
        """`program_started` by `time.perf_counter`, and the seconds of earlier processes."""
        self.productive_seconds = productive_before
        self._started = program_started - wall_before
        self._last_step: float | None = None  # when it ended
        self._paused = 0.0

    @property
    def wall_seconds(self) -> float:
        """The wall time of the run so far."""
        return time.perf_counter() - self._started

    @property
    def share(self) -> float:
        """The goodput so far, between 0 and 1."""
        return self.productive_seconds / self.wall_seconds

    def end_step(self, good: bool) -> None:
        """Adds the time since the previous step, unless this one was skipped or is the first of the process."""
        now = time.perf_counter()
        if good and self._last_step is not None:
            # A pause that overlaps with a step under way may be longer than the rest of it.
            self.productive_seconds += max(now - self._last_step - self._paused, 0.0)
        self._last_step, self._paused = now, 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context for work other than steps."""
        started = time.perf_counter()
        yield
        self._paused += time.perf_counter() - started
