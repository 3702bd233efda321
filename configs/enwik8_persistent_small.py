"""The small all-attention network of "Augmenting Self-attention with Persistent Memory" (arXiv:1907.01470) on enwik8.

    python main.py --config=configs/enwik8_persistent_small.py

Published: 1.03 dev / 1.01 test bits per byte, 38,501,725 parameters, 450,000 steps and 30,000 more at a tenth of the
learning rate.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """18 layers of width 512 with 1024 persistent vectors per head instead of the feed-forward network."""
    config = base.get_config()
    config.model.layers = 18
    config.model.persistent = 1024
    config.span.penalty = 1e-7
    config.train.steps = 480_000
    config.train.cooldown_start = 450_000
    return config
