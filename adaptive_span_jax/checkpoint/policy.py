"""When checkpoints are saved: so that a kill never costs more than the config's interval, in steps or minutes.

    step 0         800      1000      1600      1800
         |----------|=========|---------|=========|
                    a save begins …     the next one begins
                              … and is waited for here, at the latest

What a kill costs is the time from the beginning of one save to the end of the next. A save therefore begins when four
fifths of an interval have passed, the rest is for writing it beside training, and training waits only for one that has
not ended then.
"""

import math
import time
from collections.abc import Callable

from adaptive_span_jax.config import CheckpointConfig

BEGIN_AFTER = 4 / 5


class SavePolicy:
    """The clock of a run's saves, of which there is one at a time."""

    def __init__(self, config: CheckpointConfig, agree: Callable[[int], int]) -> None:
        self._config = config
        self._agree = agree
        self._begun = self._whole = time.monotonic()  # when the newest save began, and the newest that has ended

    def begin(self) -> None:
        """A save begins."""
        self._begun = time.monotonic()

    def end(self) -> None:
        """It is whole."""
        self._whole = self._begun

    def due(self, step: int, newest: int) -> bool:
        """Whether a save should begin after a step; `newest` is the step of the newest save."""
        counted = step % math.ceil(BEGIN_AFTER * self._config.every_steps) == 0
        if counted or not self._config.every_minutes:
            return counted
        late = self._agree(time.monotonic() - self._begun >= BEGIN_AFTER * 60 * self._config.every_minutes)
        # What is agreed on may be an answer from before the last save.
        return bool(late) and step > newest + 1

    def must_wait(self, step: int, whole: int) -> bool:
        """Whether a kill in this step would cost more than an interval; `whole` is the newest whole save's step."""
        minutes = (time.monotonic() - self._whole) / 60
        return step - whole > self._config.every_steps or 0 < self._config.every_minutes < minutes
