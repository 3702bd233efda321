"""The large all-attention network of "Augmenting Self-attention with Persistent Memory" (arXiv:1907.01470) on enwik8.

    python main.py --config=configs/enwik8_persistent.py

Published: 1.00 dev / 0.98 test bits per byte, 114,017,773 parameters, 200,000 steps and 10,000 more at a tenth of the
learning rate. The paper's large model reaches the same with 208,910,221 parameters.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """36 layers of width 512 with 2048 persistent vectors per head instead of the feed-forward network."""
    config = base.get_config()
    config.model.layers = 36
    config.model.persistent = 2048
    config.model.dropout = 0.4
    config.span.penalty = 1e-7
    config.train.steps = 210_000
    config.train.cooldown_start = 200_000
    return config
