"""The cases of the speed benchmarks: the small published model with three settings of the spans."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import adaptive_span_jax
from configs import base

CASES = ("start", "trained", "fixed")
STREAMS = 4
VOCABULARY = 205


def make_config(case: str, dropout: float) -> Any:
    """The config of a case. Warm-up is as published, so spans hardly change during timing."""
    config = base.get_config()
    config.train.batch_size = STREAMS
    config.evaluate.batch_size = STREAMS
    config.model.dropout = dropout
    if case == "fixed":
        config.span.update(kind="fixed", limit=2048)
    return config


def trained_z_LH() -> np.ndarray:
    """The spans of the case `trained`."""
    return np.array(
        json.loads((Path(adaptive_span_jax.__file__).parent / "planning" / "trained_spans.json").read_text())["z_LH"]
    )


def segment(number: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_BT, targets_BT), the same for both sides."""
    length = base.get_config().train.segment
    ids = np.random.default_rng(number).integers(0, VOCABULARY, (STREAMS, length + 1), np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()
