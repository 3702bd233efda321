"""Pictures of a model."""

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed, and none is opened

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def span_heat_map(z_LH: np.ndarray, ramp: int, limit: int) -> Figure:
    """The span of every head in positions, ramp included, one row per layer with the last layer on top."""
    span_LH = np.minimum(np.ceil(z_LH) + ramp, limit)
    layers, heads = span_LH.shape
    figure = Figure(figsize=(1.8 + 0.55 * heads, 1.4 + 0.4 * layers), layout="constrained")
    axes = figure.add_subplot()
    shortest = float(min(ramp, limit))
    scale = LogNorm(shortest, max(float(span_LH.max()), 2 * shortest))
    image = axes.imshow(span_LH, cmap="cividis", norm=scale, origin="lower", aspect="auto")
    for layer, head in np.ndindex(layers, heads):
        value = span_LH[layer, head]
        colour = "black" if scale(value) > 0.5 else "white"
        axes.text(head, layer, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set(xlabel="head", ylabel="layer", title="Span of every head (positions)")
    axes.set_xticks(range(heads), [str(head + 1) for head in range(heads)])
    axes.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True))
    figure.colorbar(image, label="positions, log scale")
    return figure


def pixels(figure: Figure) -> np.ndarray:
    """A figure as an array [height, width, 3] of bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
