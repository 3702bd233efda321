"""`--mode=evaluate`: scores a checkpoint on dev and test by both protocols, or on a file."""

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.commands.compress import read_input
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.inference.loaded_model import load, load_params
from adaptive_span_jax.inference.scoring import make_decoder_step, score_with_cache
from adaptive_span_jax.model import flops, span
from adaptive_span_jax.runtime import hosts, sharding, storage, strict_json, terminal
from adaptive_span_jax.training import objective
from adaptive_span_jax.training.evaluation import PROTOCOLS, check_streams


def evaluate(directory: Path, which: str, changes: Mapping[str, Any] | None = None) -> int:
    """Scores dev and test, prints a table and writes `evaluation.json`; returns the exit code.

    Uses the checkpoint's own config with `changes`: how to evaluate, where the data is.
    """
    mesh = sharding.make_mesh()
    config, saved, params = load_params(directory, which, mesh)
    config = config.changed(changes or {})
    hosts.on_process_zero("data", lambda: corpora.prepare(config.data))
    corpus = corpora.load(config.data)
    workdir.check_same_run(directory, saved, config, corpus.fingerprint)
    splits = {"dev": corpus.dev, "test": corpus.test}
    for split, protocol in itertools.product(splits, PROTOCOLS):
        check_streams(config, splits[split], protocol, split)
    decoder = CachedDecoder.of(config, params)
    decoder_step = make_decoder_step(decoder, mesh)

    found: dict[str, Any] = {"step": saved.step, "unit": corpus.unit}
    rows, average = {}, 0.0
    for split, ids in splits.items():
        for protocol in PROTOCOLS:
            started = time.perf_counter()
            with terminal.share_done(f"evaluating {split}, {protocol} protocol") as show:
                scored = score_with_cache(decoder, ids, protocol, decoder_step, mesh, show)
            speed = scored.tokens / (time.perf_counter() - started)
            average = float(span.average_span(scored.z_LH, config.span.ramp, config.span.limit))
            perplexity = objective.perplexity(scored.nats)
            found[f"{split}_{protocol}"] = {
                "bits": scored.bits,
                "perplexity": perplexity,
                "tokens": scored.tokens,
                "average_span": average,
                "flops_per_token": flops.paper_flops(config, average),
                "tokens_per_second": speed,
            }
            rows[f"{split}, {protocol}"] = (
                f"{scored.bits:.4f} bits per {corpus.unit}, perplexity {perplexity:.3f}, "
                f"{terminal.counted(scored.tokens, 'token')} scored, {speed:,.0f} tokens/s"
            )
    rows["average span"] = f"{average:.1f} positions"
    rows["FLOPS per token"] = (
        f"{flops.paper_flops(config, average) / 1e6:.2f} million multiply-adds, counted as in the paper"
    )
    terminal.show_block(f"Evaluation of {directory}, step {saved.step:,}", rows)
    if hosts.is_process_zero():
        storage.write_text(directory / "evaluation.json", strict_json.dumps(found, indent=2) + "\n")
    return 0


def evaluate_file(directory: Path, which: str, file: Path) -> int:
    """Scores the bytes of a file in one stream from empty memory and prints the result; returns the exit code."""
    text = read_input(file)
    if len(text) < 2:
        raise UserError(
            f"--input={file} has {terminal.counted(len(text), 'byte')}; the first is not scored, so it needs 2"
        )
    model = load(directory, which)
    with terminal.share_done(f"evaluating {file.name}") as show:
        nats = -float(model.logprobs(text, show).mean(dtype=np.float64))
    terminal.show_block(
        f"Evaluation of {directory}, step {model.step:,}",
        {
            str(
                file
            ): f"{objective.bits(nats):.4f} bits per {model.unit}, perplexity {objective.perplexity(nats):.3f}, "
            f"{terminal.counted(len(text) - 1, 'token')} scored"
        },
    )
    return 0
