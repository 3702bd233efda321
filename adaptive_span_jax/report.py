"""`--mode=report`: what a run looks like. `report/` has a page, and every figure as SVG, PNG and CSV."""

import csv
import dataclasses
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax import corpus as corpora
from adaptive_span_jax import (
    display,
    flops,
    head_reach,
    health,
    model,
    observation,
    report_page,
    sharding,
    span,
    storage,
    strict_json,
    workdir,
)
from adaptive_span_jax.config import Config
from adaptive_span_jax.corpus import Corpus
from adaptive_span_jax.entropy import order2_bits
from adaptive_span_jax.figures.attention import attention_patterns
from adaptive_span_jax.figures.cost import cost_by_limit
from adaptive_span_jax.figures.drawing import Drawing
from adaptive_span_jax.figures.passage import passage_spans
from adaptive_span_jax.figures.spans import span_history, spans_by_layer
from adaptive_span_jax.figures.training import training_curves
from adaptive_span_jax.finished_model import FinishedModel
from adaptive_span_jax.metrics import read_lines
from adaptive_span_jax.observation import Observation
from adaptive_span_jax.paper_tables import Row, tables
from adaptive_span_jax.report_sample import Sample, draw_sample
from adaptive_span_jax.result import read_result
from adaptive_span_jax.score import make_finished_step, score_finished
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
    order2_bits: float  # of train: what any model should beat
    z_LH: np.ndarray  # each head's z in positions, averaged over all scored tokens of dev where it depends on the token
    metrics: list[dict[str, Any]]
    spans: list[dict[str, Any]]
    observation: Observation
    sample: Sample | None  # None if parameters or predictions are not finite

    @property
    def average_span(self) -> float | None:
        """As published logs report it; None if it is not finite."""
        average = float(span.average_span(self.z_LH, self.config.span.ramp, self.config.span.limit))
        return average if math.isfinite(average) else None

    def row(self) -> Row:
        """Its row in the paper's tables."""
        config = self.config
        # Another stream than the published one, if nearly.
        without_newlines = ", newlines dropped" if config.data.newlines == "drop" else ""
        return Row(
            f"this run ({config.span.kind}, S = {config.span.limit}{without_newlines})",
            config.model.layers,
            self.average_span,
            self.parameters,
            self.flops_per_token,
            self.dev_bits,
            self.test_bits,
        )

    @property
    def flops_per_token(self) -> float | None:
        """Multiply-adds per token in the paper's counting."""
        return None if self.average_span is None else flops.paper_flops(self.config, self.average_span)


def report(directory: Path, which: str, changes: Mapping[str, Any] | None = None) -> int:
    """Writes the report on a run's checkpoint, with `changes` to its own config; returns the exit code."""
    mesh = sharding.make_mesh()
    config, saved, params = load_params(directory, which, mesh)
    config = config.changed(changes or {})
    corpus = corpora.load(config.data)
    workdir.check_same_run(directory, saved, config, corpus.fingerprint)
    z_LH = _dev_z(config, directory, corpus, params, saved.step, mesh)
    page = write_report(config, directory, corpus, jax.device_get(params), saved.step, z_LH)
    display.say(f"Wrote {page}")
    return 0


def write_report(
    config: Config, directory: Path, corpus: Corpus, params: model.Params, step: int, z_LH: np.ndarray
) -> Path:
    """Writes `report/` of a run whose parameters, and z as dev's evaluation found it, are in hand; returns the page."""
    with display.share_done("writing the report") as show:
        run = collect(config, directory, corpus, params, step, z_LH)
        show(0.5)
        target = directory / "report"
        storage.make_folder(target)
        drawings = draw(run)
        for number, drawing in enumerate(drawings, start=1):
            drawing.save(target)
            show(0.5 + 0.5 * number / len(drawings))
        paper = tables(run.corpus, run.row())
        written = io.StringIO()
        rows = [("this run", *run.row()[:-1])] + [(table.title, *row[:-1]) for table in paper for row in table.rows]
        csv.writer(written, lineterminator="\n").writerows([("table", *Row._fields[:-1]), *rows])
        storage.write_text(target / "tables.csv", written.getvalue())
        concerns = health.concerns(config, run.metrics, run.spans)
        summary = _summary(run, concerns)
        storage.write_text(target / "summary.json", strict_json.dumps(summary, indent=2) + "\n")
        page = target / "index.html"
        storage.write_text(page, report_page.page(summary, concerns, drawings, paper))
    return page


def _dev_z(config: Config, directory: Path, corpus: Corpus, params: model.Params, step: int, mesh: Mesh) -> np.ndarray:
    """z_LH as an evaluation of dev finds it: from the parameters, from `result.json`, or by evaluating dev now."""
    if config.span.kind != "dynamic":
        return head_reach.largest_z(config, jax.device_get(params))
    if "z_LH" in (result := _result_of_step(directory, step)):
        return np.array(result["z_LH"])
    finished = FinishedModel.of(config, params)
    with display.share_done("averaging the dynamic spans over dev") as show:
        return score_finished(finished, corpus.dev, "exact", make_finished_step(finished, mesh), mesh, show).z_LH


def _result_of_step(directory: Path, step: int) -> dict[str, Any]:
    """`result.json`, if it is about this step's checkpoint."""
    result = read_result(directory, step) or {}
    return result if result.get("steps") == step else {}


def collect(config: Config, directory: Path, corpus: Corpus, params: model.Params, step: int, z_LH: np.ndarray) -> Run:
    """Everything the report is made of."""
    metrics = [_finite(line) for line in read_lines(directory / "metrics.jsonl") if line["step"] <= step]
    spans = [line for line in read_lines(directory / "spans.jsonl") if line["step"] <= step]
    spans = [line for line in spans if np.isfinite(np.array(line["z_LH"], float)).all()]
    result = _finite(_result_of_step(directory, step))
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
        order2_bits=result.get("order2_bits") or order2_bits(corpus.train),
        z_LH=z_LH,
        metrics=metrics,
        spans=spans,
        observation=seen,
        sample=draw_sample(config, params, corpus, step),
    )


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """What is left of a line of a log without the numbers that are not finite, which JSON may write as null."""
    return {
        name: value
        for name, value in numbers.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def draw(run: Run) -> list[Drawing]:
    """The figures that the run has numbers for."""
    seen, ramp, limit = run.observation, run.config.span.ramp, run.config.span.limit
    dynamic = run.config.span.kind == "dynamic"
    found = [spans_by_layer(run.z_LH, ramp, limit, "averaged over all scored tokens of dev" if dynamic else "")]
    if len(run.spans) > 1:
        steps_N, z_NLH = (np.array([line[name] for line in run.spans]) for name in ("step", "z_LH"))
        found.append(span_history(steps_N, z_NLH, ramp, limit))
    found.append(attention_patterns(seen.weight_LHS, run.z_LH, ramp, seen.queries))
    found.append(cost_by_limit(run.config, run.z_LH, seen.furthest_z_LH))
    if any("train_bits" in line for line in run.metrics):
        found.append(training_curves(run.metrics, run.unit))
    if run.config.span.kind == "dynamic":  # other spans do not depend on the text
        found.append(passage_spans(seen.passage, seen.passage_span_T))
    return found


def _summary(run: Run, concerns: list[health.Concern]) -> dict[str, Any]:
    config = run.config
    span_LH = span.head_spans(run.z_LH, config.span.ramp, config.span.limit)
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
        "order2_bits": run.order2_bits,
        "average_span": run.average_span,
        "shortest_span": float(span_LH.min()),
        "longest_span": float(span_LH.max()),
        "flops_per_token": run.flops_per_token,
        "flops_per_token_fixed": flops.paper_flops(config, config.span.limit),
        "input_share": float(np.median(waited)) if waited else None,
        "sample": run.sample._asdict() if run.sample else None,
        "concerns": [concern._asdict() for concern in concerns],
    }
