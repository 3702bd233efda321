"""Training curves: bits, learning rate and speed."""

from collections.abc import Sequence
from typing import Any

from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from adaptive_span_jax.figures.drawing import BLUE, GREEN, PINK, RED, Drawing, panels, styled


@styled
def training_curves(lines: Sequence[dict[str, Any]], unit: str) -> Drawing:
    """From the lines of `metrics.jsonl`."""
    trained = [line for line in lines if "train_bits" in line]
    evaluated = [line for line in lines if "dev_bits" in line]
    figure, (bits, rate, speed) = panels(3, 1, height=4.6, sharex=True, height_ratios=(2.2, 1, 1))

    def draw(axes: Any, lines: Sequence[dict[str, Any]], name: str, colour: str, form: str, label: str | None) -> None:
        axes.plot([line["step"] for line in lines], [line[name] for line in lines], form, color=colour, label=label,
                  linewidth=1.3, markersize=4)  # fmt: skip

    draw(bits, trained, "train_bits", BLUE, "-", "train")
    draw(bits, evaluated, "dev_bits", RED, "o-", "dev")
    draw(rate, trained, "learning_rate", GREEN, "-", None)
    draw(speed, trained, "tokens_per_second", PINK, "-", None)
    bits.set(ylabel=f"bits per {unit}")
    bits.legend()
    rate.set(ylabel="learning rate", ylim=(0, None))
    speed.set(ylabel="tokens/s", xlabel="step", ylim=(0, None))
    for axes in (speed.xaxis, speed.yaxis):
        axes.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    speed.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    figure.align_ylabels()
    names = ("train_bits", "dev_bits", "learning_rate", "tokens_per_second", "penalty_nats", "average_span")
    last = [f"{found[-1][name]:.3f} bits on {part}" for found, name, part in
            ((trained, "train_bits", "train"), (evaluated, "dev_bits", "dev")) if found]  # fmt: skip
    return Drawing(
        name="training",
        title="Training",
        caption=f"Bits per {unit} on train (mean since the line before) and on dev; learning rate; speed.",
        alt=f"Training curves up to step {lines[-1]['step']}, ending at {' and '.join(last)}.",
        figure=figure,
        columns=("step", *names),
        rows=[(line["step"], *(line.get(name, "") for name in names)) for line in lines],
    )
