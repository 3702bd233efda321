"""The defaults of `adaptive_span_jax/config.py`: the published 12-layer model with adaptive spans, on enwik8.

That file documents every field and its valid values. Other configs start from this one and set only what differs. Any
field can be overridden on the command line, e.g. `--config.train.batch_size=8`.
"""

import dataclasses

from ml_collections import ConfigDict

from adaptive_span_jax.config import Config


def get_config() -> ConfigDict:
    """Every field with its published default."""
    return ConfigDict(dataclasses.asdict(Config()))
