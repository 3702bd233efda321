"""Do spans go as far as they must? Runs on made text in which every third symbol is a copy from a known distance.

    python benchmarks/lags.py [--workdir=runs/lags] [--runs NAME …]

A record is three symbols, g, m and c. g is random, one of eight. So is m, whose number j has a probability in
proportion to 1/√j, and which says where c is copied from: c is the g of an earlier record, `spacing`·j positions
before m. `Text.entropy(L)` are the bits per symbol of a model that knows the copies from up to L positions
back and guesses the others; `Text.entropy()` is the text's entropy.

Every run is an ordinary run of `configs/lags.py`. The same command resumes, and skips finished runs. Writes lags.svg,
.png and .csv (spans by step), copies.svg, .png and .csv (what copies cost by their distance), and prints the table of
docs/lags.md.
"""

import argparse
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import adaptive_span_jax
from adaptive_span_jax.model.span import head_spans
from adaptive_span_jax.report.figures.drawing import BLUE, GREEN, PINK, RED, Drawing, panels, styled
from adaptive_span_jax.runtime import storage, terminal
from adaptive_span_jax.training.metrics import read_lines
from benchmarks import runs

RECORDS = 1_600_000
RECORD = 3  # symbols

# g is one of 0, 1, …, m is one of 64, 65, …, and c is 128 + g of an earlier record.
CONTENTS, MARKERS, COPIES = 8, 64, 128

# Copies are scored in the last records, which are in test.
SCORED_RECORDS = 20_000

# A copy that costs fewer bits is known; a guess costs 3.
KNOWN_BITS = 1


class Text(NamedTuple):
    """A made text: its copies are from about `spacing`·j positions before m, j from `first` to `last`."""

    spacing: int
    first: int
    last: int

    def save(self, folder: Path) -> Path:
        """The file with this text, which is written unless it is there."""
        path = folder / ("_".join(map(str, self)) + ".bin")
        if not path.exists():
            storage.write_bytes(path, self.make())
        return path

    @property
    def number_J(self) -> np.ndarray:
        """j."""
        return np.arange(self.first, self.last + 1)

    @property
    def distance_J(self) -> np.ndarray:
        """The distances from m to what is copied, in positions: whole records and the one position from g to m."""
        return RECORD * self.records_J + 1

    @property
    def records_J(self) -> np.ndarray:
        """How many records before m the copied one is."""
        return np.round((self.spacing * self.number_J - 1) / RECORD).astype(int)

    @property
    def probability_J(self) -> np.ndarray:
        """How often each of them occurs."""
        weight_J = 1 / np.sqrt(self.number_J)
        return weight_J / weight_J.sum()

    def make(self, records: int = RECORDS) -> bytes:
        """The records."""
        rng = np.random.default_rng(0)
        content_N, unknown_N = rng.integers(CONTENTS, size=(2, records))
        marker_N = rng.choice(len(self.records_J), records, p=self.probability_J)
        source_N = np.arange(records) - self.records_J[marker_N]
        copy_N = np.where(source_N >= 0, content_N[source_N], unknown_N)  # nothing is before the first record
        return np.stack([content_N, MARKERS + marker_N, COPIES + copy_N], axis=1).astype(np.uint8).tobytes()

    def bits(self, known_J: np.ndarray) -> float:
        """Bits per symbol: those of g and m, and again those of g for copies from distances that are not known.

        One could do a little better: a nearer record may have copied the same symbol.
        """
        content_bits = math.log2(CONTENTS)
        marker_bits = -(self.probability_J * np.log2(self.probability_J)).sum()
        guessed = self.probability_J[~known_J].sum()
        return float(content_bits + marker_bits + guessed * content_bits) / RECORD

    def entropy(self, span: float = math.inf) -> float:
        """The bits per symbol of a model that knows all copies from up to `span` positions back."""
        return self.bits(self.distance_J <= span)


class Run(NamedTuple):
    """One run: its text, and what differs from `configs/lags.py`."""

    label: str
    text: Text
    fields: dict[str, Any]


FAR, HALF = (Text(spacing, 1, 32) for spacing in (32, 16))
GAP = Text(8, 64, 71)
FIXED = {"span.kind": "fixed", "span.limit": 128, "span.penalty": 0.0}
RUNS = {
    "far": Run("31 to 1,024", FAR, {}),
    "far_2": Run("31 to 1,024, seed 2", FAR, {"seed": 2}),
    "far_3": Run("31 to 1,024, seed 3", FAR, {"seed": 3}),
    "half": Run("16 to 511", HALF, {}),
    "penalty": Run("31 to 1,024, ten times the penalty", FAR, {"span.penalty": 1e-5}),
    "limit": Run("31 to 1,024, S = 2048", FAR, {"span.limit": 2048}),
    "ramp": Run("31 to 1,024, R = 32", FAR, {"span.ramp": 32}),
    "fixed": Run("31 to 1,024, fixed span of 128", FAR, FIXED),
    "gap": Run("511 to 568", GAP, {}),
    "gap_initial": Run("511 to 568, z = 640 at the start", GAP, {"span.initial": 640.0}),
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
    copies = {name: copy_bits(RUNS[name].text, workdir / name) for name in arguments.runs}
    for drawing in (draw_spans(results, workdir), draw_copies(results, copies)):
        drawing.save(arguments.output or workdir)
    headings = ["copies from", "spans of heads", "copies known", "dev bits", "closed form", "entropy"]
    terminal.show_table(headings, [_row(RUNS[name], results[name], copies[name]) for name in arguments.runs])


def train(run: Run, workdir: Path) -> dict[str, Any]:
    """The result of a run, which is trained unless it is complete; its text is written beside its workdir."""
    return runs.finish("lags.py", workdir, {"data.path": run.text.save(workdir.parent)} | run.fields)


def copy_bits(text: Text, workdir: Path) -> np.ndarray:
    """The average bits that a run's model needs for a copy, by distance: bits_J."""
    symbols = text.save(workdir.parent).read_bytes()[-RECORD * SCORED_RECORDS :]
    with terminal.share_done(f"scoring copies of {workdir.name}") as show:
        logprobs = adaptive_span_jax.load(workdir).logprobs(symbols, show)
    marker_N = np.frombuffer(symbols, np.uint8)[1::RECORD] - MARKERS
    bits_N = -logprobs[1::RECORD] / math.log(2)  # of c: the first symbol has no score
    inside = slice(text.records_J[-1], None)  # what the first records copy is outside
    return np.bincount(marker_N[inside], bits_N[inside]) / np.bincount(marker_N[inside])


def _row(run: Run, result: dict[str, Any], copy_bits_J: np.ndarray) -> list[str]:
    spans = head_spans(np.array(result["z_LH"]), result["span"]["ramp"], result["span"]["limit"])
    return [
        run.label,
        ", ".join(f"{each:,.0f}" for each in sorted(spans.ravel(), reverse=True)),
        f"{(copy_bits_J < KNOWN_BITS).sum()} of {copy_bits_J.size}",
        f"{result['dev_bits']:.3f}",
        f"{run.text.bits(copy_bits_J < KNOWN_BITS):.3f}",
        f"{run.text.entropy():.3f}",
    ]


def _looks(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """For every run: (its name, its color, its marker)."""
    colors = (BLUE, "#56b4e9", "#5a4fcf", GREEN, RED, "#8a7800", "#a0522d", "#7f7f7f", PINK, "#2f2f2f")
    return zip(names, colors, "o<>^sDvhp*", strict=False)


@styled
def draw_spans(results: dict[str, dict[str, Any]], workdir: Path) -> Drawing:
    """All spans against steps, and bits against the longest span, on the line of the closed form."""
    figure, (growth, bits) = panels(1, 2, width=8, height=3.2)
    rows = []
    for name, color, marker in _looks(results):
        run, result = RUNS[name], results[name]
        for line in read_lines(workdir / name / "spans.jsonl"):
            spans = head_spans(np.array(line["z_LH"]), result["span"]["ramp"], result["span"]["limit"])
            rows.append((name, line["step"], *(round(float(span), 1) for span in spans.ravel())))
        steps, *spans = zip(*(row[1:] for row in rows if row[0] == name), strict=True)
        growth.plot(steps, np.transpose(spans), color=color, linewidth=1)
        reachable = range(min(run.text.distance_J) - 1, max(run.text.distance_J) + 1)
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
        columns=("run", "step", *(f"head {head}" for head in range(1, 5))),
        rows=rows,
    )


@styled
def draw_copies(results: dict[str, dict[str, Any]], copies: dict[str, np.ndarray]) -> Drawing:
    """Which copies every run knows, by their distance, and its longest span."""
    figure, axes = panels(width=8)
    rows = []
    for height, (name, color, marker) in enumerate(_looks(copies)):
        distance_J = RUNS[name].text.distance_J
        for known_J, fill in ((copies[name] < KNOWN_BITS, color), (copies[name] >= KNOWN_BITS, "none")):
            at_J = distance_J[known_J]
            axes.scatter(at_J, np.full(at_J.size, height), s=12, marker=marker, edgecolors=color, facecolors=fill)
        axes.plot([results[name]["longest_span"]] * 2, [height - 0.35, height + 0.35], color=color)
        rows += [(name, *pair) for pair in zip(distance_J.tolist(), copies[name].round(3).tolist(), strict=True)]
    axes.set(xlabel="distance of the copy (positions)", yticks=range(len(copies)))
    axes.set_yticklabels([RUNS[name].label for name in copies])
    axes.invert_yaxis()
    known = (f"{RUNS[name].label}: {(bits_J < KNOWN_BITS).sum()} of {bits_J.size}" for name, bits_J in copies.items())
    return Drawing(
        name="copies",
        title="Copies that are known, by distance",
        caption="Filled: the copy is known. Empty: it is guessed. Line: the longest span.",
        alt="Distances at which copies are known, " + "; ".join(known),
        figure=figure,
        columns=("run", "distance", "bits"),
        rows=rows,
    )


if __name__ == "__main__":
    main()
