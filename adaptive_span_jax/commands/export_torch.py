"""`--mode=export-torch`: a run's checkpoint as the published PyTorch code writes it."""

from pathlib import Path

from adaptive_span_jax.interop.convert import to_torch
from adaptive_span_jax.runtime import terminal


def export_torch(file: Path, directory: Path, which: str) -> int:
    """Writes the file; returns the exit code."""
    step = to_torch(file, directory, which)
    terminal.say(f"{file}: step {step:,} of {directory}, as the published code writes it")
    return 0
