"""`--mode=evaluate`: the newest checkpoint of a run on dev and test, by both protocols."""

import json
import time
from pathlib import Path
from typing import Any

from adaptive_span_jax import corpus as corpora
from adaptive_span_jax import display, flops, sharding, span, step, workdir
from adaptive_span_jax.checkpoint import Checkpoints
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.optimizer import make_optimizer
from adaptive_span_jax.score import PROTOCOLS, score
from adaptive_span_jax.train_state import abstract_state


def evaluate(config: Config, directory: Path, command: str) -> int:
    """Scores dev and test, prints a table and writes `evaluation.json`; answers the exit code."""
    if not (directory / "checkpoints").is_dir():
        raise UserError(f"--workdir={directory} has no checkpoints; train first: {command}")
    corpus = corpora.load(config.data)
    mesh = sharding.make_mesh()
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint)
    newest = checkpoints.newest()
    if newest is None:
        raise UserError(f"--workdir={directory} has no whole checkpoint; train first: {command}")
    saved = checkpoints.describe(newest)
    workdir.check_same_run(directory, saved, config, corpus.fingerprint)
    abstract = abstract_state(config, len(corpus.vocabulary), make_optimizer(config.train), mesh)
    params = checkpoints.restore_params(saved.step, abstract.params)

    eval_step = step.make_eval_step(config, mesh)
    found: dict[str, Any] = {"step": saved.step, "unit": corpus.unit}
    rows, average = {}, 0.0
    for split, ids in (("dev", corpus.dev), ("test", corpus.test)):
        for protocol in PROTOCOLS:
            started = time.perf_counter()
            with display.share_done(f"evaluating {split}, {protocol} protocol") as show:
                scored = score(config, params, ids, protocol, eval_step, mesh, show)
            speed = scored.tokens / (time.perf_counter() - started)
            average = float(span.average_span(scored.z_LH, config.span.ramp, config.span.limit))
            found[f"{split}_{protocol}"] = {
                "bits": scored.bits,
                "perplexity": 2**scored.bits,
                "tokens": scored.tokens,
                "average_span": average,
                "flops_per_token": flops.paper_flops(config, average),
                "tokens_per_second": speed,
            }
            rows[f"{split}, {protocol}"] = (
                f"{scored.bits:.4f} bits per {corpus.unit}, perplexity {2**scored.bits:.3f}, {scored.tokens:,} tokens "
                f"scored, {speed:,.0f} tokens/s"
            )
    rows["average span"] = f"{average:.1f} positions"
    rows["FLOPS per token"] = f"{flops.paper_flops(config, average) / 1e6:.2f} million, in the paper's counting"
    display.show_block(f"Evaluation of {directory}, step {saved.step:,}", rows)
    (directory / "evaluation.json").write_text(json.dumps(found, indent=2) + "\n")
    return 0
