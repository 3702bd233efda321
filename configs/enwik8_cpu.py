"""A small model for two CPU cores on enwik8; models/enwik8_cpu has weights.

    python main.py --config=configs/enwik8_cpu.py

Expected: 1.59 dev and 1.55 test bits per byte after 24,000 steps, 1.6 hours on two cores. 1,999,589 parameters.
The weights in models/enwik8_cpu (1.46 and 1.42) come from two more runs, 3.4 hours, which start from these;
docs/enwik8.md has their commands and says how the settings were chosen.
"""

from ml_collections import ConfigDict

from configs import base


def get_config() -> ConfigDict:
    """6 layers of width 160 with spans of up to 2048 positions."""
    config = base.get_config()
    config.model.layers = 6
    config.model.width = 160
    config.model.heads = 4
    config.model.feedforward = 640
    config.model.dropout = 0.0  # training reads less than an epoch
    config.span.limit = 2048

    config.train.batch_size = 8
    config.train.segment = 256
    config.train.steps = 24_000
    config.train.cooldown_start = 22_000
    # With a warm-up of 100 steps this rate diverged within 200 steps: Adagrad's first steps are its longest.
    config.train.learning_rate = 0.07
    config.train.warmup_steps = 3_000
    config.train.clip = 0.3

    config.evaluate.every_steps = 2_500
    config.evaluate.max_tokens = 200_000
    config.checkpoint.every_steps = 2_500
    config.log.every_steps = 500
    return config
