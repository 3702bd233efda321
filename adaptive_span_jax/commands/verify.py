"""`--mode=verify`: are the checkpoints of a run what was written? Reads everything, changes nothing."""

from pathlib import Path

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import terminal


def verify(workdir: Path) -> int:
    """Checks every checkpoint's hashes and prints a table; the exit code: 0 if all are whole, 1 if any is damaged."""
    directory = workdir / "checkpoints"
    steps = sealing.sealed_steps(directory)
    if not steps:
        raise UserError(f"--workdir={workdir} has no checkpoints to verify; name the workdir of a run that has trained")
    rows, damaged = {}, 0
    for step in steps:
        folder = directory / str(step)
        with terminal.share_done(f"checking step {step:,}") as show:
            damage = sealing.find_damage(folder, show)
        if not folder.exists():
            continue  # a run that is training has deleted it meanwhile
        damaged += damage is not None
        rows[f"step {step:,}"] = f"damaged: {damage}" if damage else f"whole, {terminal.size(sealing.bytes_in(folder))}"
    for folder in sealing.leftovers(directory):
        rows[folder.name] = "unfinished: being written now, or a process was killed meanwhile; not a checkpoint"
    for folder in sorted((directory / sealing.DAMAGED).glob("*")):
        rows[f"{sealing.DAMAGED}/{folder.name}"] = f"set aside earlier, {terminal.size(sealing.bytes_in(folder))}"
    terminal.show_block(f"Checkpoints of {workdir}", rows)
    return 1 if damaged else 0
