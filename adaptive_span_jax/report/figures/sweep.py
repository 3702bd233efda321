"""Runs that differ only in their span: bits, average span and cost against the limit S."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from adaptive_span_jax.report.figures.drawing import BLUE, GREEN, RED, Drawing, leave_empty, panels, styled

_LOOKS = {"fixed": (RED, "--", "s"), "adaptive": (BLUE, "-", "o"), "dynamic": (GREEN, ":", "^")}


class Point(NamedTuple):
    """A finished run."""

    kind: str
    limit: int
    seed: int
    steps: int
    dev_bits: float
    test_bits: float
    average_span: float
    longest_span: float
    flops_per_token: float  # counted as in the paper
    seconds: float


@styled
def span_sweep(points: Sequence[Point], unit: str) -> Drawing:
    """The paper's Figure 3. Of several seeds, lines show the mean and bars the smallest and largest."""
    points = sorted(points, key=lambda point: (list(_LOOKS).index(point.kind), point.limit, point.seed))
    figure, axes = panels(1, 3, width=9, height=2.9)
    values = (
        ("dev_bits", 1.0, f"dev bits per {unit}"),
        ("average_span", 1.0, "average span (positions, log scale)"),
        ("flops_per_token", 1e-6, "million multiply-adds per token"),
    )
    for panel, (name, scale, label) in zip(axes, values, strict=True):
        for kind, (color, dashes, marker) in _LOOKS.items():
            found: dict[int, list[float]] = {}
            for point in points:
                if point.kind == kind and math.isfinite(getattr(point, name)):
                    found.setdefault(point.limit, []).append(getattr(point, name) * scale)
            if found:
                mean = np.array([np.mean(seeds) for seeds in found.values()])
                ends = np.array([(min(seeds), max(seeds)) for seeds in found.values()])
                bars = np.abs(ends - mean[:, None]).T
                panel.errorbar([*found], mean, bars, fmt=dashes, marker=marker, color=color, capsize=3, label=kind)
        panel.set(xlabel="limit S (positions)", ylabel=label)
        if not panel.lines:
            leave_empty(panel, "no finite numbers")
            continue
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator(sorted({point.limit for point in points})))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panel.margins(y=0.12)
        if name == "average_span":
            panel.set_yscale("log", base=2)
            panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if name == "flops_per_token":
            panel.set_ylim(0, None)
    if axes[0].lines:
        axes[0].legend()
    return Drawing(
        name="span_sweep",
        title="Bits, spans and cost as S grows",
        caption="Runs that differ only in their span (paper, Figure 3).",
        alt="; ".join(
            f"{point.kind} S = {point.limit}, seed {point.seed}: {point.dev_bits:.3f} bits, "
            f"average span {point.average_span:.1f}"
            for point in points
        ),
        figure=figure,
        columns=Point._fields,
        rows=[tuple(round(value, 4) if isinstance(value, float) else value for value in point) for point in points],
    )
