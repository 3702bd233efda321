"""The span of every head, at the end and during training."""

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter

from adaptive_span_jax.model.span import head_spans
from adaptive_span_jax.report.figures.drawing import (
    BLUE,
    INK,
    Drawing,
    leave_empty,
    name_at_edge,
    panels,
    shades,
    styled,
)

# A limit within this factor of the spans is drawn; a more distant one would leave most of the figure empty.
_CLOSE = 1.25


def span_heat_map(z_LH: np.ndarray, ramp: int, limit: int) -> Figure:
    """A heat map of every head's span in positions, including the ramp: one row per layer, the last layer on top."""
    span_LH = head_spans(z_LH, ramp, limit)
    layers, heads = span_LH.shape
    figure = Figure(figsize=(1.8 + 0.55 * heads, 1.4 + 0.4 * layers), layout="constrained")
    axes = figure.add_subplot()
    if reason := _why_empty(span_LH):
        leave_empty(axes, reason)
        return figure
    shortest = float(min(ramp, limit))
    scale = LogNorm(shortest, max(float(np.nanmax(span_LH)), 2 * shortest))
    image = axes.imshow(span_LH, cmap="cividis", norm=scale, origin="lower", aspect="auto")
    for layer, head in np.ndindex(layers, heads):
        value = span_LH[layer, head]
        finite = np.isfinite(value)
        color = "white" if finite and scale(value) <= 0.5 else "black"
        text = f"{value:.1f}" if finite else "–"
        axes.text(head, layer, text, ha="center", va="center", fontsize=8, color=color)
    axes.set(xlabel="head", ylabel="layer", title="Span of every head (positions)")
    axes.set_xticks(range(heads), [str(head + 1) for head in range(heads)])
    axes.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    figure.colorbar(image, label="positions, log scale")
    return figure


def _why_empty(span: np.ndarray) -> str | None:
    """The reason why there is nothing to draw, or None."""
    if not span.size:
        return "no spans were logged" if span.ndim == 3 else "the model has no heads"
    return None if np.isfinite(span).any() else "no span is finite"


@styled
def spans_by_layer(z_LH: np.ndarray, ramp: int, limit: int, averaged: str = "") -> Drawing:
    """The paper's Figure 5; `averaged`: over which tokens, if spans depend on them."""
    span_LH = head_spans(z_LH, ramp, limit)
    layers, heads = span_LH.shape
    figure, axes = panels()
    bad = int(np.isnan(span_LH).sum())
    missing = (
        f" {bad} of {span_LH.size} heads {'has' if bad == 1 else 'have'} a span that is not finite." if bad else ""
    )
    if reason := _why_empty(span_LH):
        leave_empty(axes, reason)
        alt = f"Empty: {reason}."
    else:
        # Heads of a layer are drawn side by side, so that equal spans do not overlap.
        layer_LH = np.arange(1, layers + 1)[:, None] + 0.5 * (np.arange(heads)[None, :] + 0.5 - heads / 2) / heads
        axes.plot(layer_LH.ravel(), span_LH.ravel(), "o", color=BLUE, markersize=4)
        _span_axis(axes, span_LH, ramp, limit)
        axes.set(xlabel="layer", xlim=(0.4, layers + 0.6))
        axes.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        longest = np.unravel_index(np.nanargmax(span_LH), span_LH.shape)
        alt = (
            f"Spans of {layers} layers of {heads} heads between {np.nanmin(span_LH):.1f} and {np.nanmax(span_LH):.1f} "
            f"positions, the longest in layer {longest[0] + 1}; the limit is {limit}."
        )
    return Drawing(
        name="spans",
        title="Span of every head",
        caption=f"Each dot is a head{', ' * bool(averaged)}{averaged}; spans include the ramp of {ramp} positions "
        f"(paper, Figure 5).{missing}",
        alt=alt,
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
    figure, axes = panels()
    if reason := _why_empty(span_NLH):
        leave_empty(axes, reason)
        alt = f"Empty: {reason}."
    else:
        _span_lines(figure, axes, steps_N, span_NLH)
        _span_axis(axes, span_NLH, ramp, limit)
        finite = np.flatnonzero(np.isfinite(span_NLH).any(axis=(1, 2)))
        first, last = (int(finite[end]) for end in (0, -1))
        alt = (
            f"Spans of all heads between step {steps_N[first]} and step {steps_N[last]}: from "
            f"{np.nanmean(span_NLH[first]):.1f} to {np.nanmean(span_NLH[last]):.1f} positions on average."
        )
    return Drawing(
        name="span_history",
        title="Spans over training",
        caption="One line per head; colors go from the first layer to the last.",
        alt=alt,
        figure=figure,
        columns=("step", "layer", "head", "span_positions"),
        rows=[
            (int(steps_N[index]), layer + 1, head + 1, round(float(span), 1))
            for (index, layer, head), span in np.ndenumerate(span_NLH)
        ],
    )


def _span_lines(figure: Figure, axes: matplotlib.axes.Axes, steps_N: np.ndarray, span_NLH: np.ndarray) -> None:
    """Draws one line per head in its layer's color, and the legend of layers."""
    layers = span_NLH.shape[1]
    for layer, color in enumerate(shades(layers)):
        lines = axes.plot(steps_N, span_NLH[:, layer], color=color, linewidth=1)
        lines[0].set_label(f"layer {layer + 1}")
    axes.set(xlabel="step")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    # With many layers, only some are in the legend; colors follow their order.
    handles, labels = axes.get_legend_handles_labels()
    every = -(-layers // 12)
    figure.legend(handles[::every], labels[::every], loc="outside right upper", fontsize=8, handlelength=1.2)


def _span_axis(axes: matplotlib.axes.Axes, span: np.ndarray, ramp: int, limit: int) -> None:
    """An axis that fits the spans; R and S are drawn as lines if close to the spans, else labeled at the edge."""
    low, high, shortest = float(np.nanmin(span)), float(np.nanmax(span)), min(ramp, limit)
    ramp_near, limit_near = shortest * _CLOSE >= low, limit <= high * _CLOSE
    low, high = min(low, shortest) if ramp_near else low, max(high, limit) if limit_near else high
    if 0 < 4 * low < high:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
        space = (high / low) ** 0.1
        axes.set(ylabel="span (positions, log scale)", ylim=(low / space, high * space))
    else:
        space = max(0.12 * (high - low), 1.0)
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))  # labels have no decimals
        axes.set(ylabel="span (positions)", ylim=(low - space, high + space))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for value, name, near, arrow, edge in (
        (shortest, f"R = {shortest:,}", ramp_near, "↓", 0),
        (limit, f"S = {limit:,}", limit_near, "↑", 1),
    ):
        if not near:
            name_at_edge(axes, f"{name} {arrow}", edge)
            continue
        axes.axhline(value, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(name, (1, value), (-2, 4 * edge - 2), xycoords=("axes fraction", "data"),
                      textcoords="offset points", ha="right", va="bottom" if edge else "top", fontsize=8)  # fmt: skip
