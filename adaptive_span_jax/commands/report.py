"""`--mode=report`: writes the report of a run's checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.inference.loaded_model import load_params
from adaptive_span_jax.report import probe
from adaptive_span_jax.report.report import dev_z, write_report
from adaptive_span_jax.report.sample import GENERATED, generated_corpus
from adaptive_span_jax.runtime import sharding, terminal
from adaptive_span_jax.runtime.command_line import command


def report(directory: Path, which: str, changes: Mapping[str, Any] | None = None) -> int:
    """Writes the report on a run's checkpoint, with `changes` to its own config; returns the exit code."""
    mesh = sharding.make_mesh()
    config, saved, params = load_params(directory, which, mesh)
    config = config.changed(changes or {})
    if corpora.is_prepared(config.data) or config.data.archive:
        corpus, probed = corpora.load(config.data), "dev"
        workdir.check_same_run(directory, saved, config, corpus.fingerprint)
    else:
        name = config.data.source
        terminal.say(
            f"{name} is not on this machine, so attention is measured on text that the model generates; "
            f"{command(directory, mode='prepare')} downloads {name}"
        )
        with terminal.waiting("generating text to probe the model on"):
            corpus, probed = generated_corpus(config, params, saved, probe.length(config)), GENERATED
    z_LH = dev_z(config, directory, corpus, params, saved.step, mesh)
    page = write_report(config, directory, corpus, jax.device_get(params), saved.step, z_LH, probed)
    terminal.say(f"Wrote {page}")
    return 0
