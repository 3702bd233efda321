"""Counts non-finite steps, i.e. those whose loss or gradient is not finite; `step.py` skips their updates."""

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import terminal


class NonFiniteSteps:
    """Counts non-finite steps, prints them, and ends a run that does not recover."""

    def __init__(self, config: Config, total: int):
        self._config = config
        self.total = total  # of the whole run
        self.in_a_row = 0  # 0: the last step was finite

    def count(self, step: int, good: bool) -> None:
        """Counts a step; raises after too many consecutive non-finite ones."""
        if good:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        terminal.say(
            f"step {step:,} skipped: loss or gradient is not finite ({self.in_a_row} in a row, {self.total} in total)"
        )
        if self.in_a_row >= self._config.train.max_nonfinite_steps:
            raise UserError(
                f"{terminal.counted(self.in_a_row, 'step')} in a row up to step {step:,} had a non-finite loss or "
                "gradient (config.train.max_nonfinite_steps). Nothing was saved since the first of them; "
                f"earlier checkpoints are kept, and the same command resumes from the newest. {self._advice()}"
            )

    def check_end(self, step: int, kept: str) -> None:
        """Raises if the last step of a run is non-finite. `kept` describes the newest checkpoint."""
        if self.in_a_row:
            raise UserError(
                f"training ended on a non-finite step, step {step:,}, the last of {self.in_a_row} in a row; it was not "
                f"saved, and there is no result. {kept[0].upper()}{kept[1:]}. {self._advice()}"
            )

    def check_score(self, name: str, step: int, finite: bool, kept: str) -> None:
        """Raises if the score of a part of the text after the last step is not finite."""
        if not finite:
            raise UserError(
                f"the loss on {name} after step {step:,} is not finite, so there is no result. "
                f"{kept[0].upper()}{kept[1:]}. {self._advice()}"
            )

    def _advice(self) -> str:
        train, dtype = self._config.train, self._config.model.compute_dtype
        return (
            f"Try a smaller config.train.learning_rate (now {train.learning_rate:g}), a longer "
            f"config.train.warmup_steps (now {train.warmup_steps:,})"
            + (f", or config.model.compute_dtype=float32 in a new run (now {dtype})" if dtype == "bfloat16" else "")
        )
