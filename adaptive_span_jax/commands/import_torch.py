"""`--mode=import-torch`: creates a run from a checkpoint of the published PyTorch code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adaptive_span_jax.interop.convert import from_torch
from adaptive_span_jax.runtime.command_line import command
from adaptive_span_jax.runtime.terminal import counted, show_block


def import_torch(file: Path, directory: Path, fields: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> int:
    """Creates the run and prints what to do next; returns the exit code."""
    config = from_torch(file, directory, fields, changes)
    show_block(
        f"Imported {file}",
        {
            "model": f"{counted(config.model.layers, 'layer')} of width {config.model.width}, "
            f"{counted(config.model.heads, 'head')}, {config.span.kind} spans of at most "
            f"{counted(config.span.limit, 'position')}"
            + (
                f", {counted(config.model.persistent, 'persistent vector')} per head" if config.model.persistent else ""
            ),
            "from the config": f"ramp {config.span.ramp}, segment {config.train.segment}, dropout "
            f"{config.model.dropout}, penalty {config.span.penalty}",
            "not in the file": "memory (starts empty) and position in the text (starts at 0)",
            "evaluate it": command(directory, mode="evaluate"),
            "train it": command(directory),
        },
    )
    return 0
