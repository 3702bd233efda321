"""Where heads look: attention weight against distance, averaged over text."""

from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from adaptive_span_jax.model.span import head_spans
from adaptive_span_jax.report.figures.drawing import BLUE, RED, Drawing, leave_empty, name_at_edge, panels, styled

Head = tuple[int, int]  # (layer, head in the layer)


def short_and_long_head(weight_LHS: np.ndarray, z_LH: np.ndarray) -> tuple[Head, Head] | None:
    """The heads with the shortest and the longest span; if spans are equal, the mean distance of attention decides.

    Heads with non-finite spans or weights are skipped; None if no head remains.
    """
    mean_LH = _mean_distance(weight_LHS)
    usable = np.flatnonzero(np.isfinite(z_LH) & np.isfinite(mean_LH) & (mean_LH > 0))
    if not usable.size:
        return None
    order = usable[np.lexsort((mean_LH.ravel()[usable], z_LH.ravel()[usable]))]
    first, last = (np.unravel_index(order[end], z_LH.shape) for end in (0, -1))
    return (int(first[0]), int(first[1])), (int(last[0]), int(last[1]))


def _mean_distance(weight_S: np.ndarray) -> np.ndarray:
    """The mean distance of attention to the context; with persistent vectors the weights sum to less than 1."""
    total = weight_S.sum(axis=-1)
    return (weight_S * np.arange(1, weight_S.shape[-1] + 1)).sum(axis=-1) / np.where(total > 0, total, 1)


@styled
def attention_patterns(
    weight_LHS: np.ndarray, z_LH: np.ndarray, ramp: int, queries: int, text: str, persistent: int = 0
) -> Drawing:
    """The paper's Figure 1, for the heads with the shortest and longest span. Column x − 1 of weights: distance x.

    Weights are averaged over `queries` tokens of `text`, which is a name such as dev.
    """
    rest = ""
    limit = weight_LHS.shape[-1]
    chosen = short_and_long_head(weight_LHS, z_LH)
    figure, axes = panels()
    if chosen is None:
        reason = "no head has finite attention weights"
        leave_empty(axes, reason)
        alt = f"Empty: {reason}."
    else:
        _weight_lines(axes, weight_LHS, z_LH, chosen, ramp)
        means = [_mean_distance(weight_LHS[at]) for at in chosen]
        (short_layer, short), (long_layer, long) = chosen
        alt = (
            f"Head {short + 1} of layer {short_layer + 1} looks {means[0]:.0f} positions back on average, "
            f"head {long + 1} of layer {long_layer + 1} {means[1]:.0f}."
        )
        if persistent:
            shares = [max(1 - float(weight_LHS[at].sum()), 0) for at in chosen]
            rest = (
                f" The rest of their attention, {shares[0]:.0%} and {shares[1]:.0%}, is to their {persistent:,} "
                "persistent vectors."
            )
    return Drawing(
        name="attention",
        title="Where a short and a long head look",
        caption=f"Attention by distance, averaged over {queries:,} tokens of {text}. Dotted lines are the spans "
        f"(paper, Figure 1).{rest}",
        alt=alt + rest,
        figure=figure,
        columns=("distance", "short_head_weight", "long_head_weight"),
        rows=[
            (distance, *(float(f"{weight_LHS[at][distance - 1]:.6g}") for at in chosen))
            for distance in range(1, limit + 1)
        ]
        if chosen
        else [],
    )


def _weight_lines(axes: Any, weight_LHS: np.ndarray, z_LH: np.ndarray, chosen: tuple[Head, Head], ramp: int) -> None:
    limit = weight_LHS.shape[-1]
    distance_S = np.arange(1, limit + 1)
    for (layer, head), color, dashes in zip(chosen, (BLUE, RED), ("-", "--"), strict=True):
        weight_S, span = weight_LHS[layer, head], float(head_spans(z_LH[layer, head], ramp, limit))
        label = f"layer {layer + 1}, head {head + 1}: span {span:,.1f}"
        axes.plot(distance_S, np.where(weight_S > 0, weight_S, np.nan), dashes, color=color, linewidth=1.3, label=label)
        axes.axvline(span, color=color, linewidth=0.8, linestyle=":")
    lowest = min(float(weight_LHS[at][weight_LHS[at] > 0].min()) for at in chosen)
    furthest = max(int(np.flatnonzero(weight_LHS[at] > 0)[-1]) + 1 for at in chosen)
    axes.set(xscale="log", yscale="log", ylim=(max(lowest / 2, 1e-6), 1.2), xlim=(0.9, furthest * 1.1))
    if furthest < limit:
        name_at_edge(axes, f"S = {limit:,} →", 1)
    axes.set(xlabel="distance (positions back, log scale)", ylabel="mean attention weight (log scale)")
    if furthest < 200:  # more tick labels if there is space for them
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))  # exponents would be too small to read
    axes.legend(loc="lower left", fontsize=8)
