"""Training curves: bits, learning rate and speed."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from adaptive_span_jax.report.figures.drawing import BLUE, GREEN, PINK, RED, Drawing, leave_empty, panels, styled


@styled
def training_curves(lines: Sequence[dict[str, Any]], unit: str) -> Drawing:
    """Draws the lines of `metrics.jsonl`."""
    figure, (bits, rate, speed) = panels(3, 1, height=4.6, sharex=True, height_ratios=(2.2, 1, 1))

    curves = (
        (bits, "train_bits", BLUE, "-", "train"),
        (bits, "dev_bits", RED, "o-", "dev"),
        (rate, "learning_rate", GREEN, "-", None),
        (speed, "tokens_per_second", PINK, "-", None),
    )
    last = []
    for axes, name, color, form, label in curves:
        # A number that was not finite is missing or null in the log.
        points = [(line["step"], line[name]) for line in lines if _is_finite(line.get(name))]
        if points:
            axes.plot(*zip(*points, strict=True), form, color=color, label=label, linewidth=1.3, markersize=4)
        if points and label:
            last.append(f"{points[-1][1]:.3f} bits on {label}")
    bits.set(ylabel=f"bits per {unit}")
    if last:
        bits.legend()
    rate.set(ylabel="learning rate", ylim=(0, None))
    speed.set(ylabel="tokens/s", xlabel="step", ylim=(0, None))
    for axes in (speed.xaxis, speed.yaxis):
        axes.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    speed.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    figure.align_ylabels()
    for axes in (bits, rate, speed):
        if not axes.lines:
            leave_empty(axes, "no finite numbers were logged")
    names = ("train_bits", "dev_bits", "learning_rate", "tokens_per_second", "penalty_nats", "average_span")
    return Drawing(
        name="training",
        title="Training",
        caption=f"Bits per {unit} on train (mean since the previous log line) and on dev; learning rate; speed.",
        alt=f"Training curves up to step {lines[-1]['step']}, ending at {' and '.join(last)}."
        if last
        else "Empty: no finite bits were logged.",
        figure=figure,
        columns=("step", *names),
        rows=[(line["step"], *(line.get(name, "") for name in names)) for line in lines],
    )


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)
