"""The result of a finished run: `result.json` and the final table."""

import shlex
import statistics
from pathlib import Path
from typing import Any

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.corpus import Corpus
from adaptive_span_jax.model import flops, span
from adaptive_span_jax.runtime import storage, strict_json
from adaptive_span_jax.runtime.command_line import PROGRAM, command
from adaptive_span_jax.runtime.terminal import counted, duration, show_block
from adaptive_span_jax.training.evaluation import Score

_FILE = "result.json"


def make_result(
    config: Config, corpus: Corpus, dev: Score, test: Score, order2_bits: float, seconds: float
) -> dict[str, Any]:
    """The content of `result.json`."""
    ramp, limit = config.span.ramp, config.span.limit
    average = float(span.average_span(dev.z_LH, ramp, limit))
    span_LH = span.head_spans(dev.z_LH, ramp, limit)
    return {
        "corpus": corpus.name,
        "unit": corpus.unit,
        "dev_bits": dev.bits,
        "dev_tokens": dev.tokens,
        "test_bits": test.bits,
        "test_tokens": test.tokens,
        "order2_bits": order2_bits,
        "average_span": average,
        "shortest_span": float(span_LH.min()),
        "longest_span": float(span_LH.max()),
        "z_LH": dev.z_LH.tolist(),
        "flops_per_token": flops.paper_flops(config, average),
        "steps": config.train.steps,
        "seconds": seconds,
    }


def efficiency(goodput: float, wall_seconds: float, mfu: list[float]) -> dict[str, float]:
    """What `result.json` says about speed: goodput of the run, and the median of the logged MFU if it is known."""
    return {"goodput": goodput, "wall_seconds": wall_seconds} | ({"mfu": statistics.median(mfu)} if mfu else {})


def write_result(workdir: Path, result: dict[str, Any]) -> None:
    """Writes `result.json`, whose presence means that the run is complete."""
    storage.write_text(workdir / _FILE, strict_json.dumps(result, indent=2) + "\n")


def read_result(workdir: Path, steps: int) -> dict[str, Any] | None:
    """The result of a run that was completed with at least this many steps; None if it has non-finite numbers."""
    try:
        result = strict_json.loads((workdir / _FILE).read_text())
    except (FileNotFoundError, ValueError):
        return None
    complete = None not in result.values() and result.get("steps", 0) >= steps
    return result if complete else None


def show_result(workdir: Path, result: dict[str, Any]) -> None:
    """Prints the result, and commands to try next."""
    unit, page = result["unit"], workdir / "report" / "index.html"
    show_block(
        "Result",
        {
            f"dev bits per {unit}": f"{result['dev_bits']:.3f}   ({counted(result['dev_tokens'], 'token')} scored)",
            f"test bits per {unit}": f"{result['test_bits']:.3f}   ({counted(result['test_tokens'], 'token')} scored)",
            "order-2 entropy": f"{result['order2_bits']:.3f} bits per {unit} of the training text, a baseline",
            "average span": f"{result['average_span']:.1f} positions (mean of each layer rounded up, as published)",
            "spans of heads": f"{result['shortest_span']:.1f} to {result['longest_span']:.1f} positions",
            "FLOPS per token": f"{result['flops_per_token'] / 1e6:.2f} million multiply-adds, counted as in the paper",
            "training time": f"{duration(result['seconds'])}, {counted(result['steps'], 'step')}",
            **_efficiency(result),
            "written to": f"{workdir}/result.json, report/, metrics.jsonl, spans.jsonl, tensorboard/, checkpoints/",
        },
    )
    show_block(
        "Next",
        {
            "report": f"open {shlex.quote(str(page))}" if page.exists() else command(workdir, mode="report"),
            "evaluate again": command(workdir, mode="evaluate"),
            "train longer": command(workdir, **{"config.train.steps": 2 * result["steps"]}),
            "your own text": f"{PROGRAM} --config=bytes --config.data.path=FILE_OR_FOLDER",
        },
    )


def _efficiency(result: dict[str, Any]) -> dict[str, str]:
    """The lines about speed; results of earlier versions have none, and MFU needs a device whose peak is known."""
    lines = {}
    if "goodput" in result:
        wall = duration(result["wall_seconds"])
        lines["goodput"] = f"{100 * result['goodput']:.1f} % of {wall} were spent in steps that counted"
    if "mfu" in result:
        lines["MFU"] = f"{100 * result['mfu']:.1f} % of the devices' peak, counted as in the paper"
    return lines
