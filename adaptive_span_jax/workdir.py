"""A run's directory: can it be written, does it belong to this config, is there room."""

import json
import os
import shutil
from pathlib import Path

from adaptive_span_jax.checkpoint import Saved
from adaptive_span_jax.config import Config, differences
from adaptive_span_jax.display import size
from adaptive_span_jax.errors import UserError

# Fields that may change between the parts of a run. All others decide what the checkpoint's arrays are or mean.
_FREE = (
    "config.checkpoint.",
    "config.data.archive:",
    "config.data.directory:",
    "config.evaluate.",
    "config.generate",
    "config.log.",
    "config.model.attention:",
    "config.model.dropout:",
    "config.span.penalty:",
    "config.train.clip:",
    "config.train.cooldown_start:",
    "config.train.learning_rate:",
    "config.train.steps:",
    "config.train.warmup_steps:",
)


def make_workdir(workdir: Path) -> None:
    """Creates the directory and proves that it can be written."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / f".writable.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"--workdir={workdir} cannot be written ({error.strerror}); name another directory with --workdir"
        ) from error


def check_space(workdir: Path, checkpoint_bytes: int, keep: int) -> None:
    """Refuses to start where the checkpoints to come will not fit."""
    # The newest few, the best, and the one being written.
    needed, free = checkpoint_bytes * (keep + 2), shutil.disk_usage(workdir).free
    if needed > free:
        raise UserError(
            f"--workdir={workdir} has {size(free)} free, but {keep + 2} checkpoints of {size(checkpoint_bytes)} need "
            f"{size(needed)}; make room, name another --workdir, or keep fewer (config.checkpoint.keep is {keep})"
        )


def write_config(workdir: Path, config: Config) -> None:
    """Writes `config.json`, whole or not at all."""
    replacement = workdir / "config.json.new"
    replacement.write_text(config.to_json() + "\n")
    replacement.replace(workdir / "config.json")


def check_same_run(workdir: Path, saved: Saved, config: Config, fingerprint: str) -> list[str]:
    """Refuses a checkpoint of another model or text; answers the harmless differences, one line each."""
    changed = differences(saved.config, json.loads(config.to_json()))
    refused = [line for line in changed if not line.startswith(_FREE)]
    if refused:
        raise UserError(
            f"--workdir={workdir} has a checkpoint (step {saved.step:,}) of a different run:\n  "
            + "\n  ".join(refused)
            + "\nGo back to these values, or start a new run with another --workdir"
        )
    if saved.fingerprint != fingerprint:
        raise UserError(
            f"--workdir={workdir} has a checkpoint (step {saved.step:,}) trained on other text: its fingerprint was "
            f"{saved.fingerprint}, that of the data now is {fingerprint}. Restore the text, or start a new run with "
            "another --workdir"
        )
    return changed
