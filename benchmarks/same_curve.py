"""The same training run by this package and by the published algorithm in PyTorch: same curve, less time.

    pip install -r requirements-benchmark.txt
    python benchmarks/same_curve.py [--minutes=40] [--archive=enwik8.zip] [--workdir=runs/same_curve]

Both sides train `configs/same_curve.py` on enwik8 from the same initial weights on the same segments, without dropout,
in float32 on all cores. They take turns of some steps until each has trained for `--minutes`, so the slower side ends
at an earlier step. Dev is scored every few turns, off the clock. The same command resumes: everything up to the last
evaluation is kept. Writes same_curve.svg, .png and .csv, and prints how closely the two curves agree.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.config import Config
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.report.figures.drawing import BLUE, RED, Drawing, panels, styled
from adaptive_span_jax.runtime import storage, terminal
from benchmarks.child import Child

SIDES = {"ours": "this package", "torch": "PyTorch"}
TURN = 25  # steps
EVALUATE = 4  # turns between evaluations of dev


def run(config: Config, workdir: Path, minutes: float) -> dict[str, list[dict[str, Any]]]:
    """Trains both sides in turns, from the last evaluation if there is one; returns the curve of each side."""
    storage.make_folder(workdir)
    fields, weights = workdir / "config.json", workdir / "initial.npz"
    storage.write_text(fields, config.to_json())
    children: dict[str, Child] = {}
    for name in SIDES:
        children[name] = Child("curve_side.py", name, str(fields), str(weights))
        if name == "ours":
            children[name].ask("weights")  # which the other side starts from
    curves = {name: _resume(workdir, name, children[name]) for name in SIDES}
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=Console(stderr=True))
    with bar:
        tasks = {name: bar.add_task(SIDES[name], total=60 * minutes) for name in SIDES}
        while any(_seconds(curve) < 60 * minutes for curve in curves.values()):
            for name, curve in curves.items():
                if _seconds(curve) < 60 * minutes:
                    _evaluated_turns(children[name], curve, workdir, name)
                    bar.update(tasks[name], completed=_seconds(curve), description=f"{SIDES[name]} {_state(curve)}")
    for name, child in children.items():
        terminal.say(f"{SIDES[name]}: {_state(curves[name])}, peak memory {child.ask('memory') / 1e3:.1f} GB")
        child.close()
    return curves


def _evaluated_turns(child: Child, curve: list[dict[str, Any]], workdir: Path, name: str) -> None:
    """Some turns and an evaluation of dev, then saves the state and the curve."""
    for _ in range(EVALUATE):
        step, seconds = (curve[-1]["step"], curve[-1]["seconds"]) if curve else (0, 0.0)
        found = child.ask(f"train {TURN}")
        each = found["seconds"] / TURN
        curve += [
            {"step": step + number, "seconds": seconds + number * each, "bits": nats / np.log(2)}
            for number, nats in enumerate(found["nats"], start=1)
        ]
    curve[-1]["dev_bits"] = child.ask("dev")
    child.ask(f"save {workdir / name}.state.npz")
    storage.write_text(workdir / f"{name}.json", json.dumps(curve))


def _resume(workdir: Path, name: str, child: Child) -> list[dict[str, Any]]:
    file = workdir / f"{name}.json"
    if not file.exists():
        return []
    child.ask(f"load {workdir / name}.state.npz")
    return json.loads(file.read_text())


def _seconds(curve: list[dict[str, Any]]) -> float:
    return curve[-1]["seconds"] if curve else 0.0


def _state(curve: list[dict[str, Any]]) -> str:
    last = curve[-1]
    return f"step {last['step']:,}, {last['seconds'] / 60:.1f} min, dev {last['dev_bits']:.3f}"


def compare(curves: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """How far the curves are apart, a row per evaluation: bits of dev, and the largest gap in training before it."""
    ours, theirs = curves["ours"], curves["torch"]
    rows, start = [], 0
    for one, other in zip(ours, theirs, strict=False):
        if "dev_bits" in one and "dev_bits" in other:
            part = slice(start, one["step"])
            gap = max(abs(a["bits"] - b["bits"]) for a, b in zip(ours[part], theirs[part], strict=True))
            start = one["step"]
            rows.append(
                [
                    f"{one['step']:,}",
                    f"{one['dev_bits']:.4f}",
                    f"{other['dev_bits']:.4f}",
                    f"{gap:.1e}",
                    f"{one['seconds'] / 60:.1f}",
                    f"{other['seconds'] / 60:.1f}",
                ]
            )
    return rows


@styled
def draw(curves: dict[str, list[dict[str, Any]]]) -> Drawing:
    """Training bits by step, the gap between them, and dev bits by minutes of training."""
    figure, (bits, gap, dev) = panels(1, 3, width=9, height=2.9)
    for (name, curve), color, dashes in zip(curves.items(), (BLUE, RED), ("-", "--"), strict=True):
        smooth = np.convolve([line["bits"] for line in curve], np.ones(TURN) / TURN, "valid")
        bits.plot(np.arange(TURN, len(curve) + 1), smooth, dashes, color=color, linewidth=1.2, label=SIDES[name])
        scored = [(line["seconds"] / 60, line["dev_bits"]) for line in curve if "dev_bits" in line]
        dev.plot(*zip(*scored, strict=True), dashes, marker="o", markersize=3, color=color, label=SIDES[name])
    gaps = [abs(one["bits"] - other["bits"]) for one, other in zip(*curves.values(), strict=False)]
    gap.semilogy(range(1, len(gaps) + 1), np.maximum(gaps, 1e-8), ".", markersize=2, color=BLUE)
    bits.set(xlabel="step", ylabel=f"train bits per byte, mean of {TURN} steps")
    gap.set(xlabel="step", ylabel="gap in train bits of a step")
    dev.set(xlabel="minutes of training", ylabel="dev bits per byte")
    bits.legend()
    return Drawing(
        name="same_curve",
        title="The same curve in less time",
        caption="enwik8, this package and the published algorithm in PyTorch, from the same weights on the same text.",
        alt="; ".join(f"{SIDES[name]}: {_state(curve)}" for name, curve in curves.items()),
        figure=figure,
        columns=("side", "step", "seconds", "train_bits", "dev_bits"),
        rows=[
            (name, line["step"], round(line["seconds"], 2), round(line["bits"], 5), round(line["dev_bits"], 5))
            for name, curve in curves.items()
            for line in curve
            if "dev_bits" in line
        ],
    )


def make_config(archive: str) -> Config:
    """`configs/same_curve.py`, which both sides train."""
    fields = importlib.import_module("configs.same_curve").get_config()
    fields.data.archive = archive
    return Config.from_dict(fields.to_dict())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40, help="training time of each side")
    parser.add_argument("--archive", default="", help="a local archive of enwik8 to use instead of downloading")
    parser.add_argument("--workdir", type=Path, default=Path("runs/same_curve"))
    parser.add_argument("--output", type=Path, help="where the figure goes; the workdir unless given")
    arguments = parser.parse_args()
    config = make_config(arguments.archive)
    corpora.prepare(config.data)
    curves = run(config, arguments.workdir, arguments.minutes)
    draw(curves).save(arguments.output or arguments.workdir)
    headings = ["step", "dev, ours", "dev, PyTorch", "largest gap in training", "min, ours", "min, PyTorch"]
    terminal.show_table(headings, compare(curves))


if __name__ == "__main__":
    main()
