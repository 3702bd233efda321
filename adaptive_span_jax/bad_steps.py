"""Steps whose loss or gradient was not finite: `step.py` leaves their update out, here they are counted."""

from adaptive_span_jax import display
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError


class BadSteps:
    """Counts, says so, and ends a run that does not recover."""

    def __init__(self, config: Config, total: int):
        self._config = config
        self.total = total  # of the whole run
        self.in_a_row = 0

    def count(self, step: int, good: bool) -> None:
        """One more step is done; raises if there were too many bad ones in a row."""
        if good:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        display.say(
            f"step {step:,}: loss or gradient is not finite, its update is left out "
            f"({self.in_a_row} in a row, {self.total} in all)"
        )
        if self.in_a_row >= self._config.train.max_bad_steps:
            raise UserError(
                f"{display.counted(self.in_a_row, 'step')} in a row up to step {step:,} had a loss or gradient "
                "that is not finite (config.train.max_bad_steps). Nothing was saved since the first of them; the "
                "checkpoints before are "
                "kept, and the same command goes on from the newest. What to try: a smaller config.train.learning_rate "
                f"(now {self._config.train.learning_rate:g}), a longer config.train.warmup_steps "
                f"(now {self._config.train.warmup_steps:,}), or config.model.compute_dtype=float32 in a new run "
                f"(now {self._config.model.compute_dtype})"
            )
