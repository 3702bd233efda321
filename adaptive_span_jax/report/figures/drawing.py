"""What every figure has in common: its look, and the files it becomes (SVG, PNG and the numbers as CSV).

Text and axes are drawn in one ink, which becomes `currentColor` in SVG: the same file is readable on light and on dark
backgrounds. Data is drawn in those colors of Okabe and Ito, which color-blind people tell apart, that both
backgrounds leave visible, or in shades between two of them.
"""

import csv
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen is needed, and none is opened

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from adaptive_span_jax.runtime import storage

INK = "#1c2024"
BLUE, GREEN, RED, PINK = "#0072b2", "#009e73", "#d55e00", "#cc79a7"

# What each of linear red, green and blue contributes to brightness.
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])

# Inches. A phone shows the figure at about 72 dots an inch: text of 8 points is then 8 dots high.
WIDTH = 4.4

_STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",  # comes with matplotlib: figures are the same everywhere
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, sharp, can be searched
    "svg.hashsalt": "adaptive_span_jax",  # the same numbers give the same file
}

_DARK_AWARE = (
    f"<style>svg {{ color: {INK} }} @media (prefers-color-scheme: dark) {{ svg {{ color: #e6e8eb }} }}</style>"
)

# Use as a decorator: figures are drawn, and saved, in one style, and matplotlib's own settings stay as they are.
styled = matplotlib.rc_context(_STYLE)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure, what it shows in words, and the numbers it was drawn from."""

    name: str  # of its files
    title: str
    caption: str
    alt: str  # what somebody who cannot see it should know
    figure: Figure
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def save(self, directory: Path) -> None:
        """Writes NAME.svg, NAME.png and NAME.csv."""
        svg = self.svg().replace("<defs>", f"{_DARK_AWARE}<defs>", 1)
        storage.write_text(directory / f"{self.name}.svg", svg)
        (directory / f"{self.name}.png").write_bytes(self._render("png", dpi=160, facecolor="white"))
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows([self.columns, *self.rows])
        storage.write_text(directory / f"{self.name}.csv", written.getvalue())

    def svg(self) -> str:
        """The figure as an SVG element that takes the color of the text around it, and all the width it is given."""
        text = self._render("svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))).decode()
        text = text[text.index("<svg ") :].replace(INK, "currentColor")
        # Identifiers must stay apart when several figures stand on one page.
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", text)
        return re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", re.sub(r"\s+", " ", text, count=8))

    @styled
    def _render(self, form: str, **options: Any) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format=form, **options)
        return file.getvalue()


def panels(rows: int = 1, columns: int = 1, *, width: float = WIDTH, height: float = 2.9, **options: Any) -> Any:
    """(figure, axes), laid out tightly; axes is an array unless there is only one panel."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def leave_empty(axes: Any, reason: str) -> None:
    """Writes into a panel why nothing is drawn in it."""
    axes.tick_params(which="both", bottom=False, left=False, labelbottom=False, labelleft=False)
    axes.grid(visible=False)
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center")


def name_at_edge(axes: Any, name: str, top: int) -> None:
    """Names what lies beyond a panel's edge, over its top or just inside its bottom, at the right."""
    axes.annotate(name, (1, top), (0, 2), xycoords="axes fraction", textcoords="offset points", ha="right",
                  va="bottom", fontsize=8)  # fmt: skip


def shades(count: int) -> np.ndarray:
    """Colors in order, first to last, all of them visible on light and on dark, neighbors easy to tell apart.

    Hue goes once around, and every second color is lighter: many hues at one brightness would look alike.
    """
    around = LinearSegmentedColormap.from_list("shades", [BLUE, GREEN, "#8a7800", RED, "#b0508c"])
    color_N3 = around(np.linspace(0, 1, count))[:, :3]
    linear_N3 = np.where(color_N3 <= 0.04045, color_N3 / 12.92, ((color_N3 + 0.055) / 1.055) ** 2.4)
    # These luminances have a contrast of 3 to the dark and to the light card.
    luminance_N = np.where(np.arange(count) % 2, 0.28, 0.145)
    linear_N3 *= (luminance_N / (linear_N3 @ LUMINANCE))[:, None]
    return np.where(linear_N3 <= 0.0031308, 12.92 * linear_N3, 1.055 * linear_N3 ** (1 / 2.4) - 0.055)


def pixels(figure: Figure) -> np.ndarray:
    """A figure as an array [height, width, 3] of bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
