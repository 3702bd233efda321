"""The paper's large model on text8.

    python main.py --config=configs/text8_large.py

Published: 1.01 dev / 1.07 test bits per character, average span 245, 208,638,172 parameters, 250,000 steps and 20,000
more at a tenth of the learning rate; about 1.2 s a step on 8 V100s near the end.
"""

from ml_collections import ConfigDict

from configs import enwik8_large


def get_config() -> ConfigDict:
    """24 layers of width 768, on text8."""
    config = enwik8_large.get_config()
    config.data.source = "text8"
    config.train.steps = 270_000
    config.train.cooldown_start = 250_000
    return config
