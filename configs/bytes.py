"""Your own text as bytes, on one GPU or, slowly, a CPU.

    python main.py --config=configs/bytes.py --config.data.path=PATH

PATH is a file (plain, .gz, .bz2, .xz or .zip) or a folder, whose files are read in sorted order. The first 90 % are
train, the next 5 % dev, the last 5 % test; change this with `--config.data.splits="(0.8,0.1,0.1)"`.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """A model of about 3.3 million parameters that looks back at most 1024 bytes."""
    config = base.get_config()
    config.data.source = "files"

    config.model.layers = 4
    config.model.width = 256
    config.model.heads = 4
    config.model.feedforward = 1024
    config.model.dropout = 0.1

    config.span.limit = 1024
    config.span.penalty = 2e-6  # as for other models with this limit

    config.train.batch_size = 16
    config.train.segment = 256
    config.train.steps = 20_000
    config.train.warmup_steps = 2_000

    config.evaluate.every_steps = 1_000
    config.checkpoint.every_steps = 500
    return config
