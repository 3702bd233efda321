"""Spans on made text in which what matters lies far back: one run of `benchmarks/lags.py`, which makes the text.

    python main.py --config=configs/lags.py --config.data.path=FILE

docs/lags.md has the results.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """2 layers of 2 heads that may look 8192 positions back."""
    config = base.get_config()
    config.data.source = "files"

    config.model.layers = 2
    config.model.width = 64
    config.model.heads = 2
    config.model.feedforward = 128
    config.model.dropout = 0.0
    # The optimizer moves z / S, so that spans move in proportion to S: with 2048 they stop too early.
    config.span.limit = 8192
    config.span.ramp = 128  # wide enough to hold the next few distances of the text, wherever the span ends
    config.span.penalty = 3e-7

    config.train.batch_size = 16
    config.train.segment = 128
    config.train.steps = 2_000
    config.train.cooldown_start = 1_700
    # The warm-up lasts until spans have grown: Adagrad divides later, smaller gradients by all before.
    config.train.learning_rate = 0.1
    config.train.warmup_steps = 1_000
    config.train.clip = 0.3

    config.evaluate.batch_size = 1  # streams start with empty memory; with 8, 3 % of dev would lack some sources
    config.evaluate.every_steps = 2_000
    config.checkpoint.every_steps = 1_000
    config.checkpoint.keep = 1
    config.log.every_steps = 100
    return config
