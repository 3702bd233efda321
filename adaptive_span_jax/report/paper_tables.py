"""The paper's three tables, with a row for the run in those of its corpus.

Table 2 also has the models that two later papers build on this one, so that a run of their configs finds its like.
"""

import dataclasses
from typing import NamedTuple

LARGE_FOOTNOTE = (
    "The paper's 179M follows from its formula, L·(4d² + 2·d·FF + 2·span·d), only with a feed-forward width FF of "
    "3072. Its large models have FF = 4096, which gives 217M. The 181M of Table 2, for which no span is given, would "
    "increase by the same 38M."
)
RECOMPUTE_FOOTNOTE = (
    "T12 and T64 keep no memory: every prediction recomputes all 512 positions, at 512 times the cost of one."
)
ALL_ATTENTION_FOOTNOTE = (
    "From Augmenting Self-attention with Persistent Memory (arXiv:1907.01470): N persistent vectors per head and no "
    "feed-forward network. It gives neither multiply-adds nor the average span."
)
SANDWICH_FOOTNOTE = (
    "From Improving Transformer Models by Reordering their Sublayers (arXiv:1911.03864): the large model with its "
    "sublayers in another order, which costs the same. It gives no multiply-adds."
)
FOOTNOTES = (LARGE_FOOTNOTE, RECOMPUTE_FOOTNOTE, ALL_ATTENTION_FOOTNOTE, SANDWICH_FOOTNOTE)


class Row(NamedTuple):
    """One model. None: not given in the paper."""

    model: str
    layers: int | None
    average_span: float | None
    parameters: float | None
    flops: float | None
    dev: float | None
    test: float | None
    notes: str = ""  # numbers of its FOOTNOTES, from 1


@dataclasses.dataclass(frozen=True)
class Table:
    """Published rows, and the run's row if it has the same corpus."""

    title: str
    corpus: str
    columns: tuple[str, ...]  # fields of Row; bits come first, so that they are visible on phones
    rows: tuple[Row, ...]
    run: Row | None = None


PUBLISHED = (
    Table(
        "Table 1: text8",
        "text8",
        ("model", "dev", "test", "layers", "average_span", "parameters", "flops"),
        (
            Row("T12", 12, 512, 44e6, 22e9, None, 1.18, "2"),
            Row("Adaptive-Span (S = 8192)", 12, 314, 38e6, 42e6, 1.05, 1.11),
            Row("T64", 64, 512, 235e6, 120e9, 1.06, 1.13, "2"),
            Row("Transformer-XL", 24, 3800, 277e6, 438e6, None, 1.08),
            Row("Adaptive-Span (S = 8192)", 24, 245, 209e6, 179e6, 1.01, 1.07, "1"),
        ),
    ),
    Table(
        "Table 2: enwik8",
        "enwik8",
        ("model", "dev", "test", "layers", "parameters", "flops"),
        (
            Row("T12", 12, None, 44e6, 22e9, None, 1.11, "2"),
            Row("Transformer-XL", 12, None, 41e6, 64e6, None, 1.06),
            Row("Adaptive-Span (S = 8192)", 12, None, 39e6, 41e6, 1.04, 1.02),
            Row("All-attention (S = 8192, N = 1024)", 18, None, 39e6, None, 1.03, 1.01, "3"),
            Row("T64", 64, None, 235e6, 120e9, None, 1.06, "2"),
            Row("Transformer-XL", 18, None, 88e6, 329e6, None, 1.03),
            Row("All-attention (S = 8192, N = 2048)", 36, None, 114e6, None, 1.00, 0.98, "3"),
            Row("Transformer-XL", 24, None, 277e6, 438e6, None, 0.99),
            Row("Sandwich, Adaptive-Span (S = 8192)", 24, None, 209e6, None, None, 0.968, "4"),
            Row("Adaptive-Span (S = 8192)", 24, None, 209e6, 181e6, 1.00, 0.98, "1"),
        ),
    ),
    Table(
        "Table 3: adaptive and dynamic spans, text8",
        "text8",
        ("model", "dev", "average_span"),
        (
            Row("Adaptive (S = 1024)", 12, 123, None, None, 1.08, None),
            Row("Dynamic (S = 1024)", 12, 149, None, None, 1.08, None),
        ),
    ),
)


def tables(corpus: str, run: Row) -> tuple[Table, ...]:
    """The tables of a corpus with the run's row; all tables, without it, if the corpus is not in the paper."""
    own = tuple(dataclasses.replace(table, run=run) for table in PUBLISHED if table.corpus == corpus)
    return own or PUBLISHED


def shown(row: Row, column: str) -> str:
    """A field as the paper prints it: 38M, 1.05, –."""
    value = getattr(row, column)
    if value is None:
        return "–"
    if column in ("parameters", "flops"):
        return _short(value)
    if column == "average_span":
        return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"  # our spans have one decimal everywhere
    # A run's bits have three decimals, as in training.
    return f"{value:.2f}" if isinstance(value, float) and round(value, 2) == value else (
        f"{value:.3f}" if isinstance(value, float) else str(value)
    )  # fmt: skip


def _short(count: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"
