"""When to save: such that a kill never loses more than the config's interval, in steps or minutes.

    step 0         800      1000      1600      1800
         |----------|=========|---------|=========|
                    a save starts …     the next one starts
                              … and training waits for it here at the latest

A kill can lose everything between the start of one save and the end of the next. So a save starts after four fifths of
an interval, the rest is for writing it in the background, and training waits only if it is not finished by then.
"""

import math
import time
from collections.abc import Callable

from adaptive_span_jax.config import CheckpointConfig

BEGIN_AFTER = 4 / 5


class SavePolicy:
    """Tracks the times of a run's saves, of which there is at most one at a time."""

    def __init__(self, config: CheckpointConfig, agree: Callable[[int], int]) -> None:
        self._config = config
        self._agree = agree
        self._begun = self._whole = time.monotonic()  # start times of the newest save and of the newest finished save

    def begin(self) -> None:
        """Records that a save starts."""
        self._begun = time.monotonic()

    def end(self) -> None:
        """Records that it is finished."""
        self._whole = self._begun

    def due(self, step: int, newest: int) -> bool:
        """Whether to start a save after a step; `newest` is the step of the newest save."""
        counted = step % math.ceil(BEGIN_AFTER * self._config.every_steps) == 0
        if counted or not self._config.every_minutes:
            return counted
        late = self._agree(time.monotonic() - self._begun >= BEGIN_AFTER * 60 * self._config.every_minutes)
        # The agreed value may date from before the last save.
        return bool(late) and step > newest + 1

    def must_wait(self, step: int, whole: int) -> bool:
        """Whether a kill in this step would lose more than an interval; `whole` is the newest finished save's step."""
        minutes = (time.monotonic() - self._whole) / 60
        return step - whole > self._config.every_steps or 0 < self._config.every_minutes < minutes
