"""The paper's Figure 3 at CPU scale: fixed, adaptive and dynamic spans with several limits S and the same budget.

    python benchmarks/span_sweep.py enwik8.zip

Every run is an ordinary run of `configs/span_sweep.py` in runs/span_sweep/KIND-S-SEED. The same command resumes an
interrupted sweep and skips finished runs. Any other file or folder of text does as well. Writes span_sweep.svg, .png
and .csv, and prints a table.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.report.figures.sweep import Point, span_sweep
from adaptive_span_jax.runtime import terminal
from benchmarks import runs

# The cheapest first, so that an interrupted sweep has some results.
RUNS = ("adaptive-64", "fixed-64", "adaptive-256", "fixed-256", "adaptive-1024", "dynamic-1024", "fixed-1024")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file or folder of text, read as bytes")
    parser.add_argument("--workdir", type=Path, default=Path("runs/span_sweep"))
    parser.add_argument("--output", type=Path, help="where the figure goes; the workdir unless given")
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="KIND-S", help=" ".join(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args()
    workdir = arguments.workdir.resolve()
    fields = {"data.path": arguments.text.resolve(), "train.steps": arguments.steps}
    points = []
    for seed in arguments.seeds:
        for run in arguments.runs:
            result = runs.finish(f"span_sweep.py:{run}", workdir / f"{run}-{seed}", fields | {"seed": seed})
            same = {name: result[name] for name in Point._fields if name in result}
            points.append(Point(kind=result["span"]["kind"], limit=result["span"]["limit"], **same))
    output = arguments.output or workdir
    span_sweep(points, "byte").save(output)
    headings = ["spans", "S", "dev bits per byte", "test", "average span", "longest", "M multiply-adds per token"]
    by_run = itertools.groupby(sorted(points), key=lambda point: (point.kind, point.limit))
    terminal.show_table(headings, [_row(seeds) for _, seeds in by_run])


def _row(points: Iterable[Point]) -> list[str]:
    """The seeds of one run side by side."""
    found = [*points]

    def of_seeds(name: str, form: str, scale: float = 1.0) -> str:
        return " / ".join(format(scale * getattr(point, name), form) for point in found)

    return [
        found[0].kind,
        str(found[0].limit),
        of_seeds("dev_bits", ".3f"),
        of_seeds("test_bits", ".3f"),
        of_seeds("average_span", ".0f"),
        of_seeds("longest_span", ".0f"),
        of_seeds("flops_per_token", ".2f", 1e-6),
    ]


if __name__ == "__main__":
    main()
