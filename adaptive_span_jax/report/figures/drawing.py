"""What all figures share: their style, and their files (SVG, PNG and the data as CSV).

Text and axes have one color, which becomes `currentColor` in SVG, so that the same file is readable on light and dark
backgrounds. Data is drawn in colors of Okabe and Ito, which color-blind people can distinguish, and which are visible
on both backgrounds, or in shades between two of them.
"""

import csv
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display is needed

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from adaptive_span_jax.runtime import storage

INK = "#1c2024"
BLUE, GREEN, RED, PINK = "#0072b2", "#009e73", "#d55e00", "#cc79a7"

# The luminance of linear red, green and blue.
LUMINANCE = np.array([0.2126, 0.7152, 0.0722])

# In inches. A phone shows the figure at about 72 pixels per inch, so text of 8 points is 8 pixels high.
WIDTH = 4.4

_STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",  # bundled with matplotlib, so figures are the same everywhere
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: small, sharp, searchable
    "svg.hashsalt": "adaptive_span_jax",  # the same numbers give the same file
}

_DARK_AWARE = (
    f"<style>svg {{ color: {INK} }} @media (prefers-color-scheme: dark) {{ svg {{ color: #e6e8eb }} }}</style>"
)

# A decorator that applies the style for drawing and saving, without changing matplotlib's global settings.
styled = matplotlib.rc_context(_STYLE)


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure, its description and its data."""

    name: str  # of its files
    title: str
    caption: str
    alt: str  # the text alternative for people who cannot see it
    figure: Figure
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def save(self, directory: Path) -> None:
        """Writes NAME.svg, NAME.png and NAME.csv; creates the directory."""
        storage.make_folder(directory)
        svg = self.svg().replace("<defs>", f"{_DARK_AWARE}<defs>", 1)
        storage.write_text(directory / f"{self.name}.svg", svg)
        storage.write_bytes(directory / f"{self.name}.png", self._render("png", dpi=160, facecolor="white"))
        written = io.StringIO()
        csv.writer(written, lineterminator="\n").writerows([self.columns, *self.rows])
        storage.write_text(directory / f"{self.name}.csv", written.getvalue())

    def svg(self) -> str:
        """The figure as an SVG element in the color of the surrounding text, as wide as its container."""
        text = self._render("svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))).decode()
        text = text[text.index("<svg ") :].replace(INK, "currentColor")
        # Ids must be unique when several figures are on one page.
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", text)
        return re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r"<svg \1", re.sub(r"\s+", " ", text, count=8))

    @styled
    def _render(self, form: str, **options: Any) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format=form, **options)
        return file.getvalue()


def panels(rows: int = 1, columns: int = 1, *, width: float = WIDTH, height: float = 2.9, **options: Any) -> Any:
    """(figure, axes) with a tight layout; axes is an array unless there is only one panel."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **options)


def leave_empty(axes: Any, reason: str) -> None:
    """Shows in a panel why it is empty."""
    axes.tick_params(which="both", bottom=False, left=False, labelbottom=False, labelleft=False)
    axes.grid(visible=False)
    axes.text(0.5, 0.5, reason, transform=axes.transAxes, ha="center", va="center")


def name_at_edge(axes: Any, name: str, top: int) -> None:
    """Labels a value beyond a panel's edge, at the right: above its top or just inside its bottom."""
    axes.annotate(name, (1, top), (0, 2), xycoords="axes fraction", textcoords="offset points", ha="right",
                  va="bottom", fontsize=8)  # fmt: skip


def shades(count: int) -> np.ndarray:
    """A sequence of colors that are visible on light and dark backgrounds, with distinguishable neighbors.

    Hue varies along the sequence and every second color is lighter, because many hues of one lightness look alike.
    """
    around = LinearSegmentedColormap.from_list("shades", [BLUE, GREEN, "#8a7800", RED, "#b0508c"])
    color_N3 = around(np.linspace(0, 1, count))[:, :3]
    linear_N3 = np.where(color_N3 <= 0.04045, color_N3 / 12.92, ((color_N3 + 0.055) / 1.055) ** 2.4)
    # These luminances have a contrast of at least 3 with the light and the dark card.
    luminance_N = np.where(np.arange(count) % 2, 0.28, 0.145)
    linear_N3 *= (luminance_N / (linear_N3 @ LUMINANCE))[:, None]
    return np.where(linear_N3 <= 0.0031308, 12.92 * linear_N3, 1.055 * linear_N3 ** (1 / 2.4) - 0.055)


def pixels(figure: Figure) -> np.ndarray:
    """A figure as an array [height, width, 3] of bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
