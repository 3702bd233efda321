"""The spans at which a step is counted: at the start, about as after training, and long ones."""

import json
from pathlib import Path

import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import span

START, TRAINED, LONG, LIMIT = "start", "trained", "2048", "limit"
NAMES = (START, TRAINED, LONG, LIMIT)
EXPLANATION = "trained is a made-up profile, 2048 and limit have every head at that span"

PROFILE = Path(__file__).with_name("trained_spans.json")


def settings(config: Config) -> dict[str, np.ndarray]:
    """z_LH of each setting that the config can have; fixed spans have only the limit."""
    if config.span.kind == "fixed":
        return {LIMIT: spans(config, LIMIT)}
    names = [name for name in NAMES if name != LONG or config.span.limit > int(LONG)]
    return {name: spans(config, name) for name in names}


def spans(config: Config, setting: str) -> np.ndarray:
    """z_LH of a setting, at most the limit."""
    shape, limit = (config.model.layers, config.model.heads), float(config.span.limit)
    if setting == TRAINED:
        return _trained_profile(config)
    if setting == START:
        dynamic = limit / (1 + np.exp(-span.DYNAMIC_INITIAL_BIAS))
        return np.full(shape, config.span.initial if config.span.kind == "adaptive" else dynamic)
    return np.full(shape, limit if setting == LIMIT else min(float(setting), limit))


def _trained_profile(config: Config) -> np.ndarray:
    """z_LH of `trained_spans.json`, resampled to the config's shape.

    By rule, not by training: each layer and head takes the z of the one at the same relative place, at most S.
    """
    profile_LH = np.array(json.loads(PROFILE.read_text())["z_LH"], float)
    rows, columns = (
        np.arange(count) * profile_LH.shape[axis] // count
        for axis, count in enumerate((config.model.layers, config.model.heads))
    )
    return np.minimum(profile_LH[rows][:, columns], config.span.limit)
