"""Do spans go as far as they must? Runs on made text in which every second symbol is a copy from a known distance.

    python benchmarks/lags.py [--workdir=runs/lags] [--runs NAME …]

A record is two symbols, f and c. f is random: number j has a probability in proportion to a power of j. It also says
where c is copied from: c is the f of an earlier record, at a distance that grows with j. `Text.entropy(L)` are the bits
per symbol of a model that knows the copies from up to L positions back and guesses the others; `Text.entropy()` is the
text's entropy.

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

RECORDS = 2_000_000

# Copies are scored in the last records, which are in test.
SCORED_RECORDS = 20_000

# A copy that costs fewer bits is known; guesses cost more than 2.
KNOWN_BITS = 1


class Text(NamedTuple):
    """A made text: its copies are from about `spacing`·j·(1 + `stretch`·j) positions back, j from `first` to `last`."""

    spacing: int
    first: int
    last: int
    stretch: float
    power: float  # a distance's probability is in proportion to 1 / j**power

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
        """The distances that symbols are copied from, in positions: whole records of two."""
        return 2 * np.round(self.spacing * self.number_J * (1 + self.stretch * self.number_J) / 2).astype(int)

    @property
    def probability_J(self) -> np.ndarray:
        """How often each of them occurs."""
        weight_J = self.number_J**-self.power
        return weight_J / weight_J.sum()

    def make(self, records: int = RECORDS) -> bytes:
        """The records, f and c alternating; c has bytes of its own, from 128 on."""
        rng = np.random.default_rng(0)
        first_N, unknown_N = rng.choice(len(self.distance_J), (2, records), p=self.probability_J)
        source_N = np.arange(records) - self.distance_J[first_N] // 2
        copy_N = np.where(source_N >= 0, first_N[source_N], unknown_N)  # nothing is before the first record
        return np.stack([first_N, 128 + copy_N], axis=1).astype(np.uint8).tobytes()

    def bits(self, known_J: np.ndarray) -> float:
        """Bits per symbol: H of f, and H again for copies from distances that are not known, which are guessed.

        One could do a little better: a nearer record may have copied the same symbol.
        """
        first_bits = -(self.probability_J * np.log2(self.probability_J)).sum()
        return float(first_bits * (1 + self.probability_J[~known_J].sum()) / 2)

    def entropy(self, span: float = math.inf) -> float:
        """The bits per symbol of a model that knows all copies from up to `span` positions back."""
        return self.bits(self.distance_J <= span)


class Run(NamedTuple):
    """One run: its text, and what differs from `configs/lags.py`."""

    label: str
    text: Text
    fields: dict[str, Any]


# 1 / √j: far copies are not too rare to be found. The distances grow more and more: 8·j + j²/8 and half of that.
FAR, HALF = Text(8, 1, 64, stretch=1 / 64, power=0.5), Text(4, 1, 64, stretch=1 / 64, power=0.5)
GAP = Text(8, 32, 39, stretch=0.0, power=1.0)
SHORTER = {"train.steps": 2000, "train.cooldown_start": 1600}
RUNS = {
    "far": Run("8 to 1,024", FAR, {}),
    "half": Run("4 to 512", HALF, {}),
    "penalty": Run("8 to 1,024, ten times the penalty", FAR, {"span.penalty": 3e-6}),
    # With seed 1 it had learned nothing after 2,200 steps.
    "fixed": Run(
        "8 to 1,024, fixed span of 64",
        FAR,
        {"span.kind": "fixed", "span.limit": 64, "span.penalty": 0.0, "seed": 2},
    ),
    "gap": Run("256 to 312", GAP, SHORTER),
    "gap_initial": Run("256 to 312, z = 384 at the start", GAP, SHORTER | {"span.initial": 384.0}),
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
    symbol_N = np.frombuffer(text.save(workdir.parent).read_bytes(), np.uint8)[-2 * SCORED_RECORDS :]
    with terminal.share_done(f"scoring copies of {workdir.name}") as show:
        logprob_N = adaptive_span_jax.load(workdir).logprobs(symbol_N.tobytes(), show)
    # The first symbol has no score, so those of copies are at even places. The first sources are outside.
    read = slice(text.distance_J[-1] // 2, None)
    index_N, bits_N = symbol_N[0::2][read], -logprob_N[0::2][read] / math.log(2)
    return np.bincount(index_N, bits_N) / np.bincount(index_N)


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
    return zip(names, (BLUE, GREEN, RED, PINK, "#8a7800", "#56b4e9"), "o^sDvP", strict=False)


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
