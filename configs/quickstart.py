"""The quick start: a small model on the source code of Python's library, two to five minutes of training on 2 cores.

    python main.py

Expected with Python 3.11.7 (the text depends on the version): 2.09 to 2.11 dev and 2.16 to 2.19 test bits per byte,
with an order-2 entropy of 2.48. Spans start at 32; the longest ends between 50 and 103 positions, depending on the
processor's rounding and the seed. Training reads a fifth of the text.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """4 layers of width 128 with spans of up to 2048 positions; no download."""
    config = base.get_config()
    config.data.source = "stdlib"

    config.model.layers = 4
    config.model.width = 128
    config.model.heads = 4
    config.model.feedforward = 512
    config.model.dropout = 0.0
    config.span.limit = 2048

    config.train.batch_size = 16
    config.train.segment = 128
    config.train.steps = 1000
    config.train.warmup_steps = 100
    config.train.clip = (
        0.1  # the published 0.03 clips every span gradient here; with 0.1, spans move within 1,000 steps
    )

    config.evaluate.every_steps = 1000
    config.checkpoint.every_steps = 100
    config.log.every_steps = 50
    return config
