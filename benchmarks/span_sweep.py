"""The paper's Figure 3 at the size of a CPU: fixed, adaptive and dynamic spans over several limits S, same budget.

    python benchmarks/span_sweep.py FILE_OR_FOLDER

Every run is an ordinary one of `configs/span_sweep.py`, kept in runs/span_sweep/KIND-S. The same command again goes on
where it stopped and skips what is finished; `--steps` trains all of them longer.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The cheapest first, so that an interrupted sweep has something to show.
RUNS = (
    *("adaptive-64", "fixed-64", "adaptive-256", "fixed-256", "adaptive-1024", "fixed-1024"),
    *("dynamic-256", "dynamic-1024"),
)


def train(run: str, text: Path, workdir: Path, steps: int) -> None:
    """One run, in a process of its own; returns at once if it is complete."""
    command = [sys.executable, "main.py", f"--config=configs/span_sweep.py:{run}", f"--config.data.path={text}"]
    command += [f"--workdir={workdir}", f"--config.train.steps={steps}", f"--config.evaluate.every_steps={steps}"]
    print(f"== {run}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file or folder of text, read as bytes")
    parser.add_argument("--workdir", type=Path, default=Path("runs/span_sweep"))
    parser.add_argument("--runs", nargs="+", default=RUNS)
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    for run in arguments.runs:
        train(run, arguments.text.resolve(), (arguments.workdir / run).resolve(), arguments.steps)


if __name__ == "__main__":
    main()
