"""Non-finite steps: `step.py` skips the update where loss or gradient is not finite; here such steps are counted."""

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
        """Counts one more step; raises if there were too many bad ones in a row."""
        if good:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        terminal.say(
            f"step {step:,}: loss or gradient is not finite, its update is left out "
            f"({self.in_a_row} in a row, {self.total} in all)"
        )
        if self.in_a_row >= self._config.train.max_nonfinite_steps:
            raise UserError(
                f"{terminal.counted(self.in_a_row, 'step')} in a row up to step {step:,} had a loss or gradient "
                "that is not finite (config.train.max_nonfinite_steps). Nothing was saved since the first of them; "
                f"checkpoints from before are kept, and the same command resumes from the newest. {self._advice()}"
            )

    def check_end(self, step: int, kept: str) -> None:
        """Raises if the last step of a run is non-finite. `kept`: which checkpoint there is."""
        if self.in_a_row:
            raise UserError(
                f"training ended on a non-finite step, step {step:,}, the last of {self.in_a_row} in a row; it is not "
                f"saved and there is no result. {kept[0].upper()}{kept[1:]}. {self._advice()}"
            )

    def check_score(self, name: str, step: int, finite: bool, kept: str) -> None:
        """Raises if the evaluation of a part of the text after the last step is not finite."""
        if not finite:
            raise UserError(
                f"the loss on {name} after step {step:,} is not finite, so there is no result. "
                f"{kept[0].upper()}{kept[1:]}. {self._advice()}"
            )

    def _advice(self) -> str:
        train, dtype = self._config.train, self._config.model.compute_dtype
        return (
            f"What to try: a smaller config.train.learning_rate (now {train.learning_rate:g}), a longer "
            f"config.train.warmup_steps (now {train.warmup_steps:,})"
            + (f", or config.model.compute_dtype=float32 in a new run (now {dtype})" if dtype == "bfloat16" else "")
        )
