"""A small model for two CPU cores on enwik8; its weights are in models/enwik8_cpu.

    python main.py --config=configs/enwik8_cpu.py

Expected: 1.65 dev and 1.64 test bits per byte after 12,800 steps, two hours on two cores beside other work. 1,953,629
parameters. docs/enwik8.md says how the settings were chosen.
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
    config.model.dropout = 0.0  # training reads less than an epoch
    config.span.limit = 2048

    config.train.batch_size = 16
    config.train.segment = 256
    config.train.steps = 12_800
    config.train.cooldown_start = 12_000
    # A warm-up of 100 steps diverged within 200 steps at this rate: Adagrad's first steps are its longest.
    config.train.learning_rate = 0.05
    config.train.warmup_steps = 1_500
    config.train.clip = 0.3

    config.evaluate.every_steps = 1_000
    config.evaluate.max_tokens = 200_000
    config.checkpoint.every_steps = 500
    config.log.every_steps = 50
    return config
