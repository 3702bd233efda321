"""Do spans go as far as they must? Runs on made text in which every second symbol is a copy from a known distance.

    python benchmarks/lags.py [--workdir=runs/lags] [--runs NAME …]

A record is two symbols, f and c. f is random: number j has a probability in proportion to 1/j, or another power of j.
It also says where c is copied from: c is the f of the record `spacing`·j positions back. `Text.entropy(L)` are the bits
per symbol of a model that knows the copies from up to L positions back and guesses the others; `Text.entropy()` is the
text's entropy.

Every run is an ordinary run of `configs/lags.py`. The same command resumes, and skips finished runs. Writes lags.svg,
.png and .csv, and prints the table of docs/lags.md.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.model.span import head_spans
from adaptive_span_jax.report.figures.drawing import BLUE, GREEN, PINK, RED, Drawing, panels, styled
from adaptive_span_jax.runtime import storage, terminal
from adaptive_span_jax.training.metrics import read_lines
from benchmarks import runs

RECORDS = 2_000_000


class Text(NamedTuple):
    """A made text: its copies are from `spacing`·j positions back, j from `first` to `last`."""

    spacing: int
    first: int
    last: int
    power: float = 1.0  # a distance's probability is in proportion to 1 / j**power

    @property
    def distance_J(self) -> np.ndarray:
        """The distances that symbols are copied from, in positions."""
        return self.spacing * np.arange(self.first, self.last + 1)

    @property
    def probability_J(self) -> np.ndarray:
        """How often each of them occurs."""
        weight_J = self.distance_J**-self.power
        return weight_J / weight_J.sum()

    def make(self, records: int = RECORDS) -> bytes:
        """The records, f and c alternating; c has bytes of its own, from 128 on."""
        rng = np.random.default_rng(0)
        first_N, unknown_N = rng.choice(len(self.distance_J), (2, records), p=self.probability_J)
        source_N = np.arange(records) - self.distance_J[first_N] // 2
        copy_N = np.where(source_N >= 0, first_N[source_N], unknown_N)  # nothing is before the first record
        return np.stack([first_N, 128 + copy_N], axis=1).astype(np.uint8).tobytes()

    def entropy(self, span: float = math.inf) -> float:
        """Bits per symbol: H of f, and H again for copies from further than `span`, which are guessed.

        One could do a little better: a nearer record may have copied the same symbol.
        """
        bits = -(self.probability_J * np.log2(self.probability_J)).sum()
        return float(bits * (1 + self.probability_J[self.distance_J > span].sum()) / 2)


class Run(NamedTuple):
    """One run: its text, and what differs from `configs/lags.py`."""

    label: str
    text: Text
    fields: dict[str, Any]


FAR, HALF, GAP = Text(8, 1, 64), Text(4, 1, 64), Text(8, 32, 39)
# With far copies as rare as 1/j, no span grew to 1,024 (docs/lags.md).
FURTHER = Text(8, 1, 128, power=0.5)
RUNS = {
    "far": Run("distances 8 to 512", FAR, {}),
    "half": Run("4 to 256", HALF, {}),
    "penalty": Run("8 to 512, ten times the penalty", FAR, {"span.penalty": 3e-5}),
    "fixed": Run("8 to 512, fixed span of 128", FAR, {"span.kind": "fixed", "span.limit": 128, "span.penalty": 0.0}),
    "further": Run(
        "8 to 1,024, far copies less rare",
        FURTHER,
        {"span.limit": 2048, "span.ramp": 64, "span.penalty": 1e-6, "train.steps": 3000},
    ),
    "gap": Run("256 to 312", GAP, {}),
    "gap_initial": Run("256 to 312, z = 384 at the start", GAP, {"span.initial": 384.0}),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, default=Path("runs/lags"))
    parser.add_argument("--output", type=Path, help="where the figure goes; the workdir unless given")
    parser.add_argument("--runs", nargs="+", default=[*RUNS], choices=[*RUNS], metavar="NAME", help=" ".join(RUNS))
    arguments = parser.parse_args()
    workdir = arguments.workdir.resolve()
    storage.make_folder(workdir)
    results = {name: train(RUNS[name], workdir / name) for name in arguments.runs}
    draw(results, workdir).save(arguments.output or workdir)
    headings = ["copies from", "spans of heads", "dev bits", "at the longest span", "entropy"]
    terminal.show_table(headings, [_row(RUNS[name], result) for name, result in results.items()])


def train(run: Run, workdir: Path) -> dict[str, Any]:
    """The result of a run, which is trained unless it is complete; its text is written beside its workdir."""
    path = workdir.with_name("_".join(map(str, run.text)) + ".bin")
    if not path.exists():
        storage.write_bytes(path, run.text.make())
    return runs.finish("lags.py", workdir, {"data.path": path} | run.fields)


def _row(run: Run, result: dict[str, Any]) -> list[str]:
    spans = head_spans(np.array(result["z_LH"]), result["span"]["ramp"], result["span"]["limit"])
    return [
        run.label,
        ", ".join(f"{each:,.0f}" for each in sorted(spans.ravel(), reverse=True)),
        f"{result['dev_bits']:.3f}",
        f"{run.text.entropy(result['longest_span']):.3f}",
        f"{run.text.entropy():.3f}",
    ]


@styled
def draw(results: dict[str, dict[str, Any]], workdir: Path) -> Drawing:
    """All spans against steps, and bits against the longest span, on the line of the closed form."""
    figure, (growth, bits) = panels(1, 2, width=8, height=3.2)
    looks = zip((BLUE, GREEN, RED, PINK, "#333333", "#8a7800", "#56b4e9"), "o^sDXvP", strict=True)
    rows = []
    for (name, result), (color, marker) in zip(results.items(), looks, strict=False):
        run, ramp, limit = RUNS[name], result["span"]["ramp"], result["span"]["limit"]
        for line in read_lines(workdir / name / "spans.jsonl"):
            spans = head_spans(np.array(line["z_LH"]), ramp, limit)
            rows.append((name, line["step"], *(round(float(span), 1) for span in spans.ravel())))
        steps, *spans = zip(*(row[1:] for row in rows if row[0] == name), strict=True)
        growth.plot(steps, np.transpose(spans), color=color, linewidth=1)
        growth.plot([], [], color=color, label=run.label)
        reachable = range(8, max(run.text.distance_J) + 1)
        expected = [run.text.entropy(span) for span in reachable]
        bits.plot(reachable, expected, color=color, linewidth=1, alpha=0.5)
        bits.plot(result["longest_span"], result["dev_bits"], marker, color=color, label=run.label)
    growth.set(xlabel="step", ylabel="span of every head (positions)")
    bits.set(xlabel="longest span (positions)", ylabel="dev bits per symbol", xscale="log")
    bits.legend(fontsize=7)
    return Drawing(
        name="lags",
        title="Spans go as far as they must",
        caption="Left: all heads of a run. Right: bits by the closed form (lines) and of the runs (marks).",
        alt="; ".join(f"{RUNS[name].label}: {result['dev_bits']:.3f} bits" for name, result in results.items()),
        figure=figure,
        columns=("run", "step", *(f"layer {layer} head {head}" for layer in (1, 2) for head in (1, 2))),
        rows=rows,
    )


if __name__ == "__main__":
    main()
