"""Which checkpoints to keep: the newest few intact ones, and the one with the best dev bits."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.checkpoint.metadata import CheckpointMetadata
from adaptive_span_jax.runtime import storage, terminal


def best(described: Mapping[int, CheckpointMetadata]) -> int | None:
    """The step with the best dev bits, or None if no checkpoint was evaluated.

    Bits on part of dev are not comparable with bits on all of it, so only checkpoints count that were evaluated on as
    many tokens (config.evaluate.max_tokens) as the newest. Within a run that is all of them, unless the field was
    changed when resuming. The last checkpoint, too, has the bits on that part, not those of the final evaluation.
    """
    found = {step: saved for step, saved in described.items() if saved.dev_bits is not None}
    limits = {step: saved.config.get("evaluate", {}).get("max_tokens", 0) for step, saved in found.items()}
    same = [step for step in found if limits[step] == limits[max(found)]]
    scored = {step: bits for step in same if (bits := found[step].dev_bits) is not None and math.isfinite(bits)}
    return min(scored, key=lambda step: scored[step], default=None)


def superseded(steps: Sequence[int], described: Mapping[int, CheckpointMetadata], keep: int) -> list[int]:
    """The steps to delete. Checkpoints without readable metadata, perhaps damaged, are never deleted."""
    kept = {*steps[-keep:], best(described)}
    return [step for step in described if step not in kept]


def check_fallback(directory: Path, newest: int) -> None:
    """Verifies the checkpoint before `newest` again. A damaged one is set aside, so it does not count as kept, and the
    one before it is verified instead.

    Skipped in a bucket: the service has its own checksums, and reading would mean a download.
    """
    if storage.in_bucket(directory):
        return
    for step in reversed([step for step in sealing.sealed_steps(directory) if step < newest]):
        damage = sealing.find_damage(directory / str(step))
        if damage is None:
            return
        aside = sealing.set_aside(directory / str(step))
        terminal.say(f"warning: the checkpoint of step {step:,} is damaged: {damage}; moved it to {aside}")
