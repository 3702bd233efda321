"""A small state and its checkpoints."""

import dataclasses
from typing import Any

import jax

from adaptive_span_jax.checkpoint.manager import CheckpointMetadata, Checkpoints
from adaptive_span_jax.data.segments import Position
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import TrainState, create_state, to_trees
from tests.conftest import tiny_config

VOCABULARY = 13


ABOUT = CheckpointMetadata(0, Position(), 0.0, "fingerprint", "abc", {})


def one_device_mesh():
    return sharding.make_mesh(jax.devices()[:1])


def make_state() -> TrainState:
    config = tiny_config()
    return create_state(config, VOCABULARY, make_optimizer(config.train), one_device_mesh())


def save(checkpoints: Checkpoints, state: TrainState, number: int, **about: Any) -> None:
    checkpoints.save(to_trees(state), dataclasses.replace(ABOUT, step=number, **about))
    checkpoints.finish()


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())
