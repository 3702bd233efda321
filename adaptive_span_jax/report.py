"""`--mode=report`: what a run looks like. `report/` has a page, and every figure as SVG, PNG and CSV."""

import csv
import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adaptive_span_jax import corpus as corpora
from adaptive_span_jax import display, flops, health, model, observation, report_page, sharding, span, storage, workdir
from adaptive_span_jax.config import Config
from adaptive_span_jax.corpus import Corpus
from adaptive_span_jax.figures.attention import attention_patterns
from adaptive_span_jax.figures.cost import cost_by_limit
from adaptive_span_jax.figures.drawing import Drawing
from adaptive_span_jax.figures.passage import passage_spans
from adaptive_span_jax.figures.spans import span_history, spans_by_layer, spans_of
from adaptive_span_jax.figures.training import training_curves
from adaptive_span_jax.metrics import read_lines
from adaptive_span_jax.observation import Observation
from adaptive_span_jax.paper_tables import Row, tables
from adaptive_span_jax.result import read_result
from adaptive_span_jax.trained_model import load_params


@dataclasses.dataclass(frozen=True)
class Run:
    """What there is to say of a run, read from its directory and its newest checkpoint."""

    name: str
    config: Config
    corpus: str
    unit: str
    step: int
    parameters: int
    dev_bits: float | None
    test_bits: float | None
    average_span: float
    metrics: list[dict[str, Any]]
    spans: list[dict[str, Any]]
    observation: Observation

    def row(self) -> Row:
        """Its row in the paper's tables."""
        config = self.config
        return Row(
            f"this run ({self.corpus}, {config.span.kind}, S = {config.span.limit})",
            config.model.layers,
            self.average_span,
            self.parameters,
            flops.paper_flops(config, self.average_span),
            self.dev_bits,
            self.test_bits,
        )


def report(directory: Path, which: str, changes: Mapping[str, Any] | None = None) -> int:
    """Writes the report on a run's checkpoint, with `changes` to its own config; returns the exit code."""
    config, saved, params = load_params(directory, which, sharding.make_mesh())
    config = config.changed(changes or {})
    corpus = corpora.load(config.data)
    workdir.check_same_run(directory, saved, config, corpus.fingerprint)
    page = write_report(config, directory, corpus, jax.device_get(params), saved.step)
    display.say(f"Wrote {page}")
    return 0


def write_report(config: Config, directory: Path, corpus: Corpus, params: model.Params, step: int) -> Path:
    """Writes `report/` of a run whose parameters are in hand; answers the page."""
    with display.share_done("writing the report") as show:
        run = collect(config, directory, corpus, params, step)
        show(0.5)
        target = directory / "report"
        storage.make_folder(target)
        drawings = draw(run)
        for number, drawing in enumerate(drawings, start=1):
            drawing.save(target)
            show(0.5 + 0.5 * number / len(drawings))
        paper = tables(run.row())
        written = io.StringIO()
        rows = [(table.title, *row[:-1]) for table in paper for row in table.rows]
        csv.writer(written, lineterminator="\n").writerows([("table", *Row._fields[:-1]), *rows])
        storage.write_text(target / "tables.csv", written.getvalue())
        concerns = health.concerns(config, run.metrics, run.spans)
        summary = _summary(run, concerns)
        storage.write_text(target / "summary.json", json.dumps(summary, indent=2) + "\n")
        page = target / "index.html"
        storage.write_text(page, report_page.page(summary, concerns, drawings, paper))
    return page


def collect(config: Config, directory: Path, corpus: Corpus, params: model.Params, step: int) -> Run:
    """Everything the report is made of."""
    metrics = [line for line in read_lines(directory / "metrics.jsonl") if line["step"] <= step]
    spans = [line for line in read_lines(directory / "spans.jsonl") if line["step"] <= step]
    result = read_result(directory, step) or {}
    evaluated = [line["dev_bits"] for line in metrics if "dev_bits" in line]
    seen = observation.observe(config, params, corpus)
    return Run(
        name=directory.resolve().name,
        config=config,
        corpus=corpus.name,
        unit=corpus.unit,
        step=step,
        parameters=model.parameter_count(params),
        dev_bits=result.get("dev_bits", evaluated[-1] if evaluated else None),
        test_bits=result.get("test_bits"),
        average_span=float(span.average_span(seen.z_LH, config.span.ramp, config.span.limit)),
        metrics=metrics,
        spans=spans,
        observation=seen,
    )


def draw(run: Run) -> list[Drawing]:
    """The figures that the run has numbers for."""
    seen, ramp, limit = run.observation, run.config.span.ramp, run.config.span.limit
    found = [spans_by_layer(seen.z_LH, ramp, limit)]
    if len(run.spans) > 1:
        steps_N, z_NLH = (np.array([line[name] for line in run.spans]) for name in ("step", "z_LH"))
        found.append(span_history(steps_N, z_NLH, ramp, limit))
    found.append(attention_patterns(seen.weight_LHS, seen.z_LH, ramp, seen.queries))
    found.append(cost_by_limit(run.config, seen.z_LH, seen.furthest_z_LH))
    if any("train_bits" in line for line in run.metrics):
        found.append(training_curves(run.metrics, run.unit))
    found.append(passage_spans(seen.passage, spans_of(seen.passage_z_T, ramp, limit), run.config.span.kind))
    return found


def _summary(run: Run, concerns: list[health.Concern]) -> dict[str, Any]:
    config = run.config
    waited = [line["input_share"] for line in run.metrics if "input_share" in line]
    return {
        "run": run.name,
        "corpus": run.corpus,
        "unit": run.unit,
        "kind": config.span.kind,
        "limit": config.span.limit,
        "step": run.step,
        "steps": config.train.steps,
        "parameters": run.parameters,
        "dev_bits": run.dev_bits,
        "test_bits": run.test_bits,
        "average_span": run.average_span,
        "flops_per_token": flops.paper_flops(config, run.average_span),
        "flops_per_token_fixed": flops.paper_flops(config, config.span.limit),
        "input_share": float(np.median(waited)) if waited else None,
        "concerns": [concern._asdict() for concern in concerns],
    }
