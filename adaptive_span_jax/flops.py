"""What a model costs per predicted token."""

from adaptive_span_jax.config import Config


def paper_flops(config: Config, average_span: float) -> float:
    """The paper's "FLOPS": multiply-adds per predicted token, L·(4d² + 2·d·FF + 2·span·d)."""
    sizes = config.model
    projections, feedforward = 4 * sizes.width**2, 2 * sizes.width * sizes.feedforward
    return sizes.layers * (projections + feedforward + 2 * average_span * sizes.width)
