"""The paper's Figure 3: adaptive spans on text8. The argument is the limit, 256 to 4096 in the paper.

    python main.py --config=configs/text8_adaptive.py:1024

Published at 1024: 1.08 bits per character on dev, average span 123; 600,000 steps.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(limit: str = "1024") -> ConfigDict:
    """One learned span per head, up to the config's argument."""
    config = base.get_config()
    config.data.source = "text8"
    config.span.limit = int(limit)
    config.span.penalty = 2e-6
    return config
