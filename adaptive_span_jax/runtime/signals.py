"""Ctrl-C and SIGTERM, polled between steps so that no step is interrupted."""

import signal
from collections.abc import Callable
from types import FrameType


class Interrupted(Exception):
    """Raised by `Interrupt.check` after a signal."""


class Interrupt:
    """A context in which the first signal is only recorded; a second one ends the process at once.

    With several processes, `agree` combines the signals that they recorded (0: none) into the one that all of them act
    on.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, agree: Callable[[int], int] = lambda noted: noted) -> None:
        self.signal: signal.Signals | None = None  # the one to act on
        self._noted = 0
        self._agree = agree

    def __enter__(self) -> "Interrupt":
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, as shells expect; 0 after SIGTERM, so that a preempted job counts as successful."""
        return 130 if self.signal == signal.SIGINT else 0

    def poll(self) -> bool:
        """Whether a signal was received and work must stop. All processes must call this equally often."""
        if self.signal is None and (agreed := self._agree(self._noted)):
            self.signal = signal.Signals(agreed)
        return self.signal is not None

    def check(self) -> None:
        """Raises Interrupted if a signal was received."""
        if self.poll():
            raise Interrupted

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
