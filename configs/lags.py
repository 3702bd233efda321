"""Spans on made text in which what matters lies far back: one run of `benchmarks/lags.py`, which makes the text.

    python main.py --config=configs/lags.py --config.data.path=FILE

docs/lags.md has the results.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """2 layers of 2 heads that may look 2048 positions back."""
    config = base.get_config()
    config.data.source = "files"

    config.model.layers = 2
    config.model.width = 64
    config.model.heads = 2
    config.model.feedforward = 128
    config.model.dropout = 0.0
    config.span.limit = 2048
    config.span.ramp = 64  # wide enough to hold the next few distances of the text, wherever the span ends
    config.span.penalty = 3e-7

    config.train.batch_size = 16
    config.train.segment = 128
    config.train.steps = 4_000
    config.train.cooldown_start = 3_200
    config.train.learning_rate = 0.05
    config.train.warmup_steps = 400
    config.train.clip = 0.3

    config.evaluate.batch_size = 1  # streams start with empty memory; with 8, 4 % of dev would lack some sources
    config.evaluate.every_steps = 4_000
    config.checkpoint.every_steps = 1_000
    config.checkpoint.keep = 1
    config.log.every_steps = 100
    return config
