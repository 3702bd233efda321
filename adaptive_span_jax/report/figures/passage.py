"""The average span under each character of a passage."""

import numpy as np

from adaptive_span_jax.report.figures.drawing import BLUE, Drawing, leave_empty, panels, styled

_PER_ROW = 40


@styled
def passage_spans(passage: bytes, span_T: np.ndarray) -> Drawing:
    """The paper's Figure 6: the span at each character, averaged over all heads."""
    span_T = np.where(np.isfinite(span_T), span_T, np.nan)
    reason = None if np.isfinite(span_T).any() else "no span is finite" if passage else "there is no text"
    rows = max(1, -(-len(passage) // _PER_ROW))
    figure, axes = panels(rows, 1, height=0.5 + 0.95 * rows, sharey=True, squeeze=False)
    for row, panel in enumerate(axes[:, 0]):
        part = slice(row * _PER_ROW, (row + 1) * _PER_ROW)
        if reason:
            leave_empty(panel, reason)
            continue
        count = len(passage[part])
        panel.bar(range(count), span_T[part], color=BLUE, width=0.85)
        panel.set_xticks(range(count), [_shown(byte) for byte in passage[part]], family="DejaVu Sans Mono")
        panel.tick_params(axis="x", length=0)
        panel.grid(visible=False, axis="x")
        panel.set_xlim(-0.6, _PER_ROW - 0.4)
    figure.supylabel("average span (positions)", fontsize=9)
    alt = (
        f"Empty: {reason}."
        if reason
        else f"Average span under each of {len(passage)} characters, between {np.nanmin(span_T):.1f} and "
        f"{np.nanmax(span_T):.1f} positions."
    )
    return Drawing(
        name="passage",
        title="Span along a passage",
        caption="Average span over all heads at each character (paper, Figure 6).",
        alt=alt,
        figure=figure,
        columns=("position", "byte", "character", "average_span_positions"),
        rows=[
            (index, byte, _shown(byte), round(float(span), 3))
            for index, (byte, span) in enumerate(zip(passage, span_T, strict=True))
        ],
    )


def _shown(byte: int) -> str:
    """A visible character; a dot for non-ASCII bytes, which are only parts of characters."""
    special = {ord("\n"): "↵", ord("\t"): "⇥", ord(" "): "␣"}
    return special.get(byte, chr(byte) if 32 < byte < 127 else "·")
