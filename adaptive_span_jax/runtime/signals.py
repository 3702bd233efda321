"""Ctrl-C and SIGTERM as a question that the loop asks between steps, so that nothing is cut off in the middle."""

import signal
from collections.abc import Callable
from types import FrameType


class Interrupted(Exception):
    """Raised where work may stop; whoever holds the state saves it."""


class Interrupt:
    """While in this context the first signal is only noted; a second one ends the process at once.

    Where several processes work together, `agree` makes of the signals that they have noted (0: none) the one that all
    of them act on.
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
        """130 after Ctrl-C, as shells expect; 0 after SIGTERM, so that a preempted job counts as ended in order."""
        return 130 if self.signal == signal.SIGINT else 0

    def poll(self) -> bool:
        """Whether a signal has come and work must stop here. All processes must ask equally often."""
        if self.signal is None and (agreed := self._agree(self._noted)):
            self.signal = signal.Signals(agreed)
        return self.signal is not None

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self.poll():
            raise Interrupted

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted = number
        for each in self.SIGNALS:
            signal.signal(each, signal.SIG_DFL)
