"""The paper's Figure 3 at CPU scale: one run of `benchmarks/span_sweep.py`, which trains every kind, S and seed.

    python main.py --config=configs/span_sweep.py:adaptive-256 --config.data.path=enwik8.zip

The argument is the kind of span and its limit S. docs/span_sweep.md has the results.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(run: str = "adaptive-256") -> ConfigDict:
    """3 layers of width 96; everything but the span is the same in all runs."""
    kind, _, limit = run.partition("-")
    config = base.get_config()
    config.data.source = "files"
    config.data.max_bytes = 8_000_000  # 7.2 MB for training, of which a run reads 5.1

    config.model.layers = 3
    config.model.width = 96
    config.model.heads = 4
    config.model.feedforward = 384
    config.model.dropout = 0.0
    config.span.kind = kind
    config.span.limit = int(limit)
    config.span.penalty = 0.0 if kind == "fixed" else 2e-6  # the paper's, for limits below 8192

    config.train.batch_size = 8
    config.train.segment = 128
    config.train.steps = 5_000
    # As in same_curve. The published clip of 0.03 leaves spans little room in a run this short.
    config.train.learning_rate = 0.05
    config.train.warmup_steps = 500
    config.train.clip = 0.3

    config.evaluate.every_steps = 5_000
    config.checkpoint.every_steps = 1_000
    config.checkpoint.keep = 1
    config.log.every_steps = 100
    return config
