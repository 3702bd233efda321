"""How far each head reads, at the end and on the way there."""

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from adaptive_span_jax.figures.drawing import BLUE, INK, Drawing, panels, shades, styled
from adaptive_span_jax.span import head_spans


def span_heat_map(z_LH: np.ndarray, ramp: int, limit: int) -> Figure:
    """The span of every head in positions, ramp included, one row per layer with the last layer on top."""
    span_LH = head_spans(z_LH, ramp, limit)
    layers, heads = span_LH.shape
    figure = Figure(figsize=(1.8 + 0.55 * heads, 1.4 + 0.4 * layers), layout="constrained")
    axes = figure.add_subplot()
    shortest = float(min(ramp, limit))
    scale = LogNorm(shortest, max(float(span_LH.max()), 2 * shortest))
    image = axes.imshow(span_LH, cmap="cividis", norm=scale, origin="lower", aspect="auto")
    for layer, head in np.ndindex(layers, heads):
        value = span_LH[layer, head]
        colour = "black" if scale(value) > 0.5 else "white"
        axes.text(head, layer, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set(xlabel="head", ylabel="layer", title="Span of every head (positions)")
    axes.set_xticks(range(heads), [str(head + 1) for head in range(heads)])
    axes.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    figure.colorbar(image, label="positions, log scale")
    return figure


@styled
def spans_by_layer(z_LH: np.ndarray, ramp: int, limit: int, averaged: str = "") -> Drawing:
    """The paper's Figure 5; `averaged`: over which tokens, where spans depend on them."""
    span_LH = head_spans(z_LH, ramp, limit)
    layers, heads = span_LH.shape
    figure, axes = panels()
    # Heads of a layer stand side by side, so that equal spans do not hide each other.
    layer_LH = np.arange(1, layers + 1)[:, None] + 0.5 * (np.arange(heads)[None, :] + 0.5 - heads / 2) / heads
    axes.plot(layer_LH.ravel(), span_LH.ravel(), "o", color=BLUE, markersize=4)
    _span_axis(axes, ramp, limit)
    axes.set(xlabel="layer", ylabel="span (positions, log scale)", xlim=(0.4, layers + 0.6))
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    longest = np.unravel_index(span_LH.argmax(), span_LH.shape)
    return Drawing(
        name="spans",
        title="Span of every head",
        caption=f"Each dot is a head{', ' * bool(averaged)}{averaged}; the span counts the ramp of {ramp} positions "
        "(paper, Figure 5).",
        alt=f"Spans of {layers} layers of {heads} heads between {span_LH.min():.1f} and {span_LH.max():.1f} positions, "
        f"the longest in layer {longest[0] + 1}; the limit is {limit}.",
        figure=figure,
        columns=("layer", "head", "z_positions", "span_positions"),
        rows=[
            (layer + 1, head + 1, round(float(z_LH[layer, head]), 3), round(float(span_LH[layer, head]), 3))
            for layer, head in np.ndindex(layers, heads)
        ],
    )


@styled
def span_history(steps_N: np.ndarray, z_NLH: np.ndarray, ramp: int, limit: int) -> Drawing:
    """How the spans grew over training."""
    span_NLH = head_spans(z_NLH, ramp, limit)
    layers = span_NLH.shape[1]
    figure, axes = panels()
    colours = shades(layers)
    for layer in range(layers):
        lines = axes.plot(steps_N, span_NLH[:, layer], color=colours[layer], linewidth=1)
        lines[0].set_label(f"layer {layer + 1}")
    _span_axis(axes, ramp, limit)
    axes.set(xlabel="step", ylabel="span (positions, log scale)")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    # Of many layers some are named: colours follow the order.
    handles, labels = axes.get_legend_handles_labels()
    every = -(-layers // 12)
    figure.legend(handles[::every], labels[::every], loc="outside right upper", fontsize=8, handlelength=1.2)
    first, last = span_NLH[0].mean(), span_NLH[-1].mean()
    return Drawing(
        name="span_history",
        title="Spans over training",
        caption="One line per head; colours go from the first layer to the last.",
        alt=f"Spans of all heads between step {steps_N[0]} and step {steps_N[-1]}: from {first:.1f} to {last:.1f} "
        "positions on average.",
        figure=figure,
        columns=("step", "layer", "head", "span_positions"),
        rows=[
            (int(steps_N[index]), layer + 1, head + 1, round(float(span), 1))
            for (index, layer, head), span in np.ndenumerate(span_NLH)
        ],
    )


def _span_axis(axes: matplotlib.axes.Axes, ramp: int, limit: int) -> None:
    """A logarithmic axis from the shortest to the longest span possible, both marked."""
    shortest = min(ramp, limit)
    axes.set_yscale("log", base=2)
    space = max((limit / shortest) ** 0.08, 1.3)  # for the two marks
    axes.set_ylim(shortest / space, limit * space)
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for value, name, side in ((shortest, f"R = {shortest:,}", -1), (limit, f"S = {limit:,}", 1)):
        axes.axhline(value, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(name, (1, value), (-2, 2 * side), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", va="bottom" if side > 0 else "top", fontsize=8)  # fmt: skip
