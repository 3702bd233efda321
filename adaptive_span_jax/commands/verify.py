"""`--mode=verify`: verifies the checksums of a run's checkpoints. Changes nothing."""

from pathlib import Path

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import terminal


def verify(workdir: Path) -> int:
    """Verifies every checkpoint and prints a table; returns exit code 0 if all are intact, 1 if any is damaged."""
    directory = workdir / "checkpoints"
    steps = sealing.sealed_steps(directory)
    if not steps:
        raise UserError(
            f"--workdir={workdir} has no checkpoints to verify; pass the workdir of a run that has saved one"
        )
    rows, damaged = {}, 0
    for step in steps:
        folder = directory / str(step)
        with terminal.share_done(f"checking step {step:,}") as show:
            damage = sealing.find_damage(folder, show)
        if not folder.exists():
            continue  # deleted in the meantime by a running training
        damaged += damage is not None
        rows[f"step {step:,}"] = (
            f"damaged: {damage}" if damage else f"intact, {terminal.size(sealing.bytes_in(folder))}"
        )
    for folder in sealing.leftovers(directory):
        rows[folder.name] = "unfinished: being written, or left by a killed process; not a checkpoint"
    for folder in sorted((directory / sealing.DAMAGED).glob("*")):
        rows[f"{sealing.DAMAGED}/{folder.name}"] = f"set aside earlier, {terminal.size(sealing.bytes_in(folder))}"
    terminal.show_block(f"Checkpoints of {workdir}", rows)
    return 1 if damaged else 0
