"""The training run that `benchmarks/same_curve.py` makes twice, here and by the published algorithm in PyTorch.

    taskset -c 0 python benchmarks/same_curve.py

1,953,629 parameters. docs/enwik8.md has the result.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """4 layers of width 192 with spans of up to 2048 positions."""
    config = base.get_config()
    config.model.layers = 4
    config.model.width = 192
    config.model.heads = 4
    config.model.feedforward = 768
    config.model.dropout = 0.0  # the two sides would draw different masks
    config.span.limit = 2048

    config.train.batch_size = 16
    config.train.segment = 256
    config.train.steps = 12_800  # more than 40 minutes allow
    # A long warm-up, because Adagrad's first steps are its longest: docs/enwik8.md has trials that diverged.
    config.train.learning_rate = 0.05
    config.train.warmup_steps = 1_500
    config.train.clip = 0.3

    config.evaluate.batch_size = 16
    config.evaluate.max_tokens = 200_000
    return config
