"""Writes `report/`: a page, and every figure as SVG, PNG and CSV."""

import csv
import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.corpus import Corpus
from adaptive_span_jax.data.entropy import order2_bits
from adaptive_span_jax.inference import cache_plan
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.inference.scoring import make_decoder_step, score_with_cache
from adaptive_span_jax.model import flops, span, transformer
from adaptive_span_jax.report import page as report_page
from adaptive_span_jax.report import probe
from adaptive_span_jax.report.figures.attention import attention_patterns
from adaptive_span_jax.report.figures.cost import cost_by_limit
from adaptive_span_jax.report.figures.drawing import Drawing
from adaptive_span_jax.report.figures.passage import passage_spans
from adaptive_span_jax.report.figures.spans import span_history, spans_by_layer
from adaptive_span_jax.report.figures.training import training_curves
from adaptive_span_jax.report.paper_tables import Row, tables
from adaptive_span_jax.report.probe import Probe
from adaptive_span_jax.report.result import read_result
from adaptive_span_jax.report.sample import Sample, draw_sample
from adaptive_span_jax.runtime import storage, strict_json, terminal
from adaptive_span_jax.training import diagnostics
from adaptive_span_jax.training.metrics import read_lines


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything the report needs of a run, from its directory and a checkpoint."""

    name: str
    config: Config
    corpus: str
    unit: str
    step: int
    parameters: int
    dev_bits: float | None
    test_bits: float | None
    order2_bits: float | None  # of train: a baseline; None if neither train nor the run's result is here
    z_LH: np.ndarray  # each head's z in positions, averaged over all scored tokens of dev if it depends on the token
    metrics: list[dict[str, Any]]
    spans: list[dict[str, Any]]
    probe: Probe
    probed: str  # the name of the text that was probed
    sample: Sample | None  # None if parameters or predictions are not finite

    @property
    def average_span(self) -> float | None:
        """The average span as in published logs; None if it is not finite."""
        average = float(span.average_span(self.z_LH, self.config.span.ramp, self.config.span.limit))
        return average if math.isfinite(average) else None

    def row(self) -> Row:
        """The run's row in the paper's tables."""
        config = self.config
        # Then the text differs slightly from the published one.
        without_newlines = ", newlines dropped" if config.data.newlines == "drop" else ""
        persistent = f", N = {config.model.persistent}" if config.model.persistent else ""
        return Row(
            f"this run ({config.span.kind}, S = {config.span.limit}{persistent}{without_newlines})",
            config.model.layers,
            self.average_span,
            self.parameters,
            self.flops_per_token,
            self.dev_bits,
            self.test_bits,
        )

    @property
    def flops_per_token(self) -> float | None:
        """Multiply-adds per token, counted as in the paper."""
        return None if self.average_span is None else flops.paper_flops(self.config, self.average_span)


def write_report(
    config: Config,
    directory: Path,
    corpus: Corpus,
    params: transformer.Params,
    step: int,
    z_LH: np.ndarray,
    probed: str = "dev",
) -> Path:
    """Writes `report/` of a run, given its parameters and the z of its dev evaluation; returns the page's path.

    `probed` names the text in `corpus.dev`, which may be another than dev (report/sample.py).
    """
    with terminal.share_done("writing the report") as show:
        run = collect(config, directory, corpus, params, step, z_LH, probed)
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
        concerns = diagnostics.concerns(config, run.metrics, run.spans)
        summary = _summary(run, concerns)
        storage.write_text(target / "summary.json", strict_json.dumps(summary, indent=2) + "\n")
        page = target / "index.html"
        storage.write_text(page, report_page.page(summary, concerns, drawings, paper))
    return page


def dev_z(
    config: Config, directory: Path, corpus: Corpus, params: transformer.Params, step: int, mesh: Mesh
) -> np.ndarray:
    """z_LH averaged over dev: from the parameters, from `result.json`, or by evaluating dev now."""
    if config.span.kind != "dynamic":
        return cache_plan.largest_z(config, jax.device_get(params))
    if "z_LH" in (result := _result_of_step(directory, step)):
        return np.array(result["z_LH"])
    decoder = CachedDecoder.of(config, params)
    with terminal.share_done("averaging the dynamic spans over dev") as show:
        return score_with_cache(decoder, corpus.dev, "exact", make_decoder_step(decoder, mesh), mesh, show).z_LH


def _result_of_step(directory: Path, step: int) -> dict[str, Any]:
    """The content of `result.json` if it is for this step, else empty."""
    result = read_result(directory, step) or {}
    return result if result.get("steps") == step else {}


def collect(
    config: Config,
    directory: Path,
    corpus: Corpus,
    params: transformer.Params,
    step: int,
    z_LH: np.ndarray,
    probed: str = "dev",
) -> Run:
    """Collects everything the report needs."""
    metrics = [_finite(line) for line in read_lines(directory / "metrics.jsonl") if line["step"] <= step]
    spans = [line for line in read_lines(directory / "spans.jsonl") if line["step"] <= step]
    spans = [line for line in spans if np.isfinite(np.array(line["z_LH"], float)).all()]
    result = _finite(_result_of_step(directory, step))
    evaluated = [line["dev_bits"] for line in metrics if "dev_bits" in line]
    seen = probe.probe_model(config, params, corpus)
    return Run(
        name=directory.resolve().name,
        config=config,
        corpus=corpus.name,
        unit=corpus.unit,
        step=step,
        parameters=transformer.parameter_count(params),
        dev_bits=result.get("dev_bits", evaluated[-1] if evaluated else None),
        test_bits=result.get("test_bits"),
        order2_bits=result.get("order2_bits") or (order2_bits(corpus.train) if corpus.train.size else None),
        z_LH=z_LH,
        metrics=metrics,
        spans=spans,
        probe=seen,
        probed=probed,
        sample=draw_sample(config, params, corpus, step, probed),
    )


def _finite(numbers: dict[str, Any]) -> dict[str, Any]:
    """A log line without its non-finite numbers, which JSON may contain as null."""
    return {
        name: value
        for name, value in numbers.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


def draw(run: Run) -> list[Drawing]:
    """The figures for which the run has data."""
    seen, ramp, limit = run.probe, run.config.span.ramp, run.config.span.limit
    dynamic = run.config.span.kind == "dynamic"
    found = [spans_by_layer(run.z_LH, ramp, limit, "averaged over all scored tokens of dev" if dynamic else "")]
    if len(run.spans) > 1:
        steps_N, z_NLH = (np.array([line[name] for line in run.spans]) for name in ("step", "z_LH"))
        found.append(span_history(steps_N, z_NLH, ramp, limit))
    persistent = run.config.model.persistent
    found.append(attention_patterns(seen.weight_LHS, run.z_LH, ramp, seen.queries, run.probed, persistent))
    found.append(cost_by_limit(run.config, run.z_LH, seen.furthest_z_LH))
    if any("train_bits" in line for line in run.metrics):
        found.append(training_curves(run.metrics, run.unit))
    if run.config.span.kind == "dynamic":  # other spans do not depend on the text
        found.append(passage_spans(seen.passage, seen.passage_span_T))
    return found


def _summary(run: Run, concerns: list[diagnostics.Concern]) -> dict[str, Any]:
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
