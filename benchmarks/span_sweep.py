"""The paper's Figure 3 at CPU scale: fixed, adaptive and dynamic spans with several limits S and the same budget.

    python benchmarks/span_sweep.py FILE_OR_FOLDER

Every run is an ordinary run of `configs/span_sweep.py` in runs/span_sweep/KIND-S. The same command resumes an
interrupted sweep and skips finished runs; `--steps` trains longer. Writes span_sweep.svg, .png and .csv.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.report.figures.sweep import Point, span_sweep
from adaptive_span_jax.runtime import storage

ROOT = Path(__file__).parents[1]

# The cheapest first, so that an interrupted sweep has some results.
RUNS = (
    *("adaptive-64", "fixed-64", "adaptive-256", "fixed-256", "adaptive-1024", "fixed-1024"),
    *("dynamic-256", "dynamic-1024"),
)


def train(run: str, text: Path, workdir: Path, steps: int) -> None:
    """Trains one run in a separate process; returns at once if it is complete."""
    command = [sys.executable, "main.py", f"--config=configs/span_sweep.py:{run}", f"--config.data.path={text}"]
    command += [f"--workdir={workdir}", f"--config.train.steps={steps}", f"--config.evaluate.every_steps={steps}"]
    print(f"== {run}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def read(workdir: Path) -> Point:
    """The result of a finished run."""
    result = json.loads((workdir / "result.json").read_text())
    span = json.loads((workdir / "config.json").read_text())["span"]
    same = {name: result[name] for name in Point._fields if name in result}
    return Point(kind=span["kind"], limit=span["limit"], **same)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file or folder of text, read as bytes")
    parser.add_argument("--workdir", default="runs/span_sweep", help="a folder, or gs://BUCKET/…")
    parser.add_argument("--output", help="where the figure goes; the workdir unless given")
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="KIND-S", help=" ".join(RUNS))
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    workdir, output = (storage.place(name or arguments.workdir) for name in (None, arguments.output))
    if not storage.in_bucket(workdir):
        workdir = workdir.resolve()
    points = []
    for run in arguments.runs:
        train(run, arguments.text.resolve(), workdir / run, arguments.steps)
        points.append(read(workdir / run))
    span_sweep(points, "byte").save(output)
    print(f"wrote {output}/span_sweep.svg, .png and .csv")


if __name__ == "__main__":
    main()
