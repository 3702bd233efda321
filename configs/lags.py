"""Spans on made text in which what matters lies far back: one run of `benchmarks/lags.py`, which makes the text.

    python main.py --config=configs/lags.py --config.data.path=FILE

docs/lags.md has the results.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """One layer of 4 heads that may look 8192 positions back."""
    config = base.get_config()
    config.data.source = "files"

    config.model.layers = 1
    config.model.width = 128
    config.model.heads = 4
    config.model.feedforward = 128
    config.model.dropout = 0.0
    config.span.limit = 8192
    config.span.ramp = 128  # holds the next four distances of the text; with R = 32, spans stop too early
    config.span.penalty = 1e-6

    config.train.batch_size = 16
    config.train.segment = 128
    config.train.steps = 2_000
    config.train.cooldown_start = 1_700
    config.train.learning_rate = 0.1
    config.train.warmup_steps = 1_000
    config.train.clip = 0.3

    config.evaluate.batch_size = 1  # streams start with empty memory; with 8, 3 % of dev would lack some sources
    config.evaluate.every_steps = 2_000
    config.checkpoint.every_steps = 1_000
    config.checkpoint.keep = 1
    config.log.every_steps = 100
    return config
