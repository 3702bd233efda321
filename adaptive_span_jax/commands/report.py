"""`--mode=report`: writes the report of a run's checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.inference.loaded_model import load_params
from adaptive_span_jax.report.report import dev_z, write_report
from adaptive_span_jax.runtime import sharding, terminal


def report(directory: Path, which: str, changes: Mapping[str, Any] | None = None) -> int:
    """Writes the report on a run's checkpoint, with `changes` to its own config; returns the exit code."""
    mesh = sharding.make_mesh()
    config, saved, params = load_params(directory, which, mesh)
    config = config.changed(changes or {})
    corpus = corpora.load(config.data)
    workdir.check_same_run(directory, saved, config, corpus.fingerprint)
    z_LH = dev_z(config, directory, corpus, params, saved.step, mesh)
    page = write_report(config, directory, corpus, jax.device_get(params), saved.step, z_LH)
    terminal.say(f"Wrote {page}")
    return 0
