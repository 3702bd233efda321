"""The paper's Figure 3: fixed spans on text8. The argument is the span, 256 to 4096 in the paper.

    python main.py --config=configs/text8_fixed.py:2048

Published as a curve only; 600,000 steps, about 550 ms a step on 8 V100s at a span of 2048.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(span: str = "1024") -> ConfigDict:
    """Every head reads the same number of positions, given as the config's argument."""
    config = base.get_config()
    config.data.source = "text8"
    config.span.kind = "fixed"
    config.span.limit = int(span)
    config.span.penalty = 0.0  # fixed spans have no penalty
    return config
