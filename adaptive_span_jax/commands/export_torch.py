"""`--mode=export-torch`: writes a run's checkpoint in the format of the published PyTorch code."""

from pathlib import Path

from adaptive_span_jax.interop.convert import to_torch
from adaptive_span_jax.runtime import terminal


def export_torch(file: Path, directory: Path, which: str) -> int:
    """Writes the file; returns the exit code."""
    step = to_torch(file, directory, which)
    terminal.say(f"Wrote step {step:,} of {directory} to {file}, in the published PyTorch format")
    return 0
