"""`--mode=export-weights`: copies a run without what only training needs, to share the model."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference.loaded_model import READ_ONLY, load_params
from adaptive_span_jax.report.result import read_result, write_result
from adaptive_span_jax.runtime import sharding, storage, strict_json, terminal
from adaptive_span_jax.training.metrics import read_lines

# Where data was on the machine that trained the model.
_LOCAL = ("data.archive", "data.directory", "init_from")


def export_weights(directory: Path, which: str, target: Path) -> int:
    """Writes the workdir `target` with a checkpoint's parameters, the run's logs and its result; returns the exit code.

    Optimizer state and segment memory stay behind, and so do paths of this machine.
    """
    if (target / "checkpoints").exists():
        raise UserError(f"--output={target} already has checkpoints; choose another directory")
    mesh = sharding.make_mesh(jax.devices()[:1])
    config, saved, params = load_params(directory, which, mesh)
    config = config.changed(dict.fromkeys(_LOCAL, ""))
    workdir.make_workdir(target)
    with Checkpoints(target / "checkpoints", READ_ONLY) as checkpoints:
        about = dataclasses.replace(saved, config=dataclasses.asdict(config))
        checkpoints.save({"params": params}, about)
        checkpoints.finish()
    workdir.write_config(target, config)
    for name in ("metrics.jsonl", "spans.jsonl"):
        lines: list[dict[str, Any]] = [line for line in read_lines(directory / name) if line["step"] <= saved.step]
        storage.write_text(target / name, "".join(strict_json.dumps(line) + "\n" for line in lines))
    result = read_result(directory, saved.step)
    if result and result["steps"] == saved.step:
        write_result(target, result)
    total = sum(storage.files(target).values())
    terminal.say(f"Wrote step {saved.step:,} of {directory} to {target}: {terminal.size(total)}, parameters only")
    return 0
