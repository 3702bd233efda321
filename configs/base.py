"""The defaults of `adaptive_span_jax/config.py`: the published 12-layer model with adaptive spans, on enwik8.

That file has every field with its meaning and what is allowed. Other configs start from this one and show only what
differs. Any field can be overridden on the command line, e.g. `--config.train.batch_size=8`.
"""

import dataclasses

from ml_collections import ConfigDict

from adaptive_span_jax.config import Config


def get_config() -> ConfigDict:
    """Every field with its published default."""
    return ConfigDict(dataclasses.asdict(Config()))
