"""A model for one GPU on enwik8, as in the published code's examples.

    python main.py --config=configs/enwik8_small.py

Published: about 1.3 bits per byte on dev, 6,480,621 parameters, 150,000 steps.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """8 layers of width 256, spans up to 1024."""
    config = base.get_config()
    config.model.layers = 8
    config.model.width = 256
    config.model.heads = 4
    config.model.feedforward = 1024
    config.model.dropout = 0.0
    config.span.limit = 1024
    config.span.penalty = 2e-6
    config.train.segment = 256
    config.train.steps = 150_000
    config.train.warmup_steps = 8_000
    return config
