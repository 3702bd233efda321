"""The paper's large model on enwik8.

    python main.py --config=configs/enwik8_large.py

Published: 1.00 dev / 0.98 test bits per byte, 208,910,221 parameters, 150,000 steps and 20,000 more at a tenth of the
learning rate; about 1.2 s a step on 8 V100s near the end.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """24 layers of width 768."""
    config = base.get_config()
    config.model.layers = 24
    config.model.width = 768
    config.model.feedforward = 4096
    config.model.dropout = 0.4
    config.train.steps = 170_000
    config.train.cooldown_start = 150_000
    return config
