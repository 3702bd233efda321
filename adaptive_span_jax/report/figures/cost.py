"""The cost per token as the limit S grows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.ticker import StrMethodFormatter

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import flops, span
from adaptive_span_jax.model.attention import paths
from adaptive_span_jax.report.figures.drawing import BLUE, GREEN, PINK, RED, Drawing, panels, styled


@styled
def cost_by_limit(config: Config, z_LH: np.ndarray, furthest_z_LH: np.ndarray) -> Drawing:
    """The paper's Figure 3, right: a fixed span compared with this model, whose spans are capped at S."""
    highest = max(config.span.limit, 8192)
    limits = [2**power for power in range(6, math.ceil(math.log2(highest)) + 1)]
    names = ("fixed_span", "this_model", "this_model_executed", "this_model_published_algorithm")
    known = z_LH.size > 0 and bool(np.isfinite(z_LH).all() and np.isfinite(furthest_z_LH).all())
    rows: list[tuple[int, ...]] = [(limit, round(flops.paper_flops(config, limit))) for limit in limits]
    if known:
        rows = [(*row, *map(round, _costs(config, z_LH, furthest_z_LH, row[0]))) for row in rows]
    figure, axes = panels()
    looks = ((RED, "--", "s"), (BLUE, "-", "o"), (GREEN, ":", "^"), (PINK, "-.", "v"))
    labels = (
        "fixed spans of S",
        "this model's spans",
        "this model, as executed here",
        "this model, published algorithm",
    )
    for cost, (color, dashes, marker), label in zip(list(zip(*rows, strict=True))[1:], looks, labels, strict=False):
        millions = [count / 1e6 for count in cost]
        axes.plot(limits, millions, dashes, marker=marker, color=color, markersize=4, linewidth=1.3, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set(xlabel="limit S (positions, log scale)", ylabel="million multiply-adds per token", ylim=(0, None))
    axes.legend(fontsize=8)
    counted = (
        "The first two are counted as in the paper (Figure 3, right); the others count every product, including masked "
        "pairs in a tile and the repeated projection of memory."
        if known
        else "Counted as in the paper (Figure 3, right). This model is not shown: its spans are not finite."
    )
    return Drawing(
        name="cost",
        title="Cost per token as S grows",
        caption=f"Multiply-adds of the forward pass. {counted}",
        alt=f"From S = {limits[0]} to S = {limits[-1]} a fixed span costs {rows[0][1] / 1e6:.2f} to "
        f"{rows[-1][1] / 1e6:.2f} million multiply-adds per token"
        + (f", this model {rows[0][2] / 1e6:.2f} to {rows[-1][2] / 1e6:.2f}." if known else "."),
        figure=figure,
        columns=("limit", *names)[: len(rows[0])],
        rows=rows,
    )


def _costs(config: Config, z_LH: np.ndarray, furthest_z_LH: np.ndarray, limit: int) -> tuple[float, float, float]:
    """This model's multiply-adds per token with limit S, counted in three ways."""
    # A larger limit does not make a head reach further.
    average = span.average_span(np.minimum(z_LH, limit), config.span.ramp, min(limit, config.span.limit))
    # Where spans started does not matter, and may be beyond the limit.
    config = dataclasses.replace(config, span=dataclasses.replace(config.span, limit=limit, initial=0.0))
    path = paths.choose_for(config, jax.default_backend()).name
    cost = flops.cost(config, jnp.asarray(np.minimum(furthest_z_LH, limit)), path)
    return flops.paper_flops(config, average), float(cost.executed), float(cost.published)
