"""Which checkpoints are kept: the newest few that are whole, and the one with the best dev bits."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.checkpoint.metadata import CheckpointMetadata
from adaptive_span_jax.runtime import storage, terminal


def best(described: Mapping[int, CheckpointMetadata]) -> int | None:
    """The step with the best dev bits, if any was evaluated.

    Bits on the first tokens of dev cannot be compared with bits on all of it, so only those count that were evaluated
    on as many tokens (config.evaluate.max_tokens) as the newest. Within one run that is all of them, unless the field
    was changed on resuming: also at the last step, what is written beside the checkpoint is on the first tokens.
    """
    found = {step: saved for step, saved in described.items() if saved.dev_bits is not None}
    limits = {step: saved.config.get("evaluate", {}).get("max_tokens", 0) for step, saved in found.items()}
    same = [step for step in found if limits[step] == limits[max(found)]]
    scored = {step: bits for step in same if (bits := found[step].dev_bits) is not None and math.isfinite(bits)}
    return min(scored, key=lambda step: scored[step], default=None)


def superseded(steps: Sequence[int], described: Mapping[int, CheckpointMetadata], keep: int) -> list[int]:
    """The steps that are no longer kept. Those that cannot be described, perhaps damaged, are not among them."""
    kept = {*steps[-keep:], best(described)}
    return [step for step in described if step not in kept]


def check_fallback(directory: Path, newest: int) -> None:
    """Reads the checkpoint before `newest` again and compares its checksums; a damaged one is set aside, and the one
    before it is checked instead. What is set aside does not count as kept.

    Not in a bucket: the service compares checksums of its own, and reading means downloading all of it.
    """
    if storage.in_bucket(directory):
        return
    for step in reversed([step for step in sealing.sealed_steps(directory) if step < newest]):
        damage = sealing.find_damage(directory / str(step))
        if damage is None:
            return
        aside = sealing.set_aside(directory / str(step))
        terminal.say(f"warning: the checkpoint of step {step:,} is damaged: {damage}; it is set aside: {aside}")
