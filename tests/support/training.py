"""Train steps without the loop's evaluations, checkpoints and logs."""

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import Position, Streams
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training import step
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import TrainState, create_state


class Trained(NamedTuple):
    """The losses of some steps, and what they ended with."""

    nats: np.ndarray
    z_LH: np.ndarray
    state: TrainState
    position: Position


def run_steps(
    config: Config,
    mesh: Mesh,
    count: int,
    *,
    ids: np.ndarray,
    vocabulary: int,
    state: TrainState | None = None,
    position: Position | None = None,
) -> Trained:
    """Trains for `count` steps, across epochs, from `state` (which is donated) or from the beginning.

    Fails if the step is compiled more than once.
    """
    optimizer = make_optimizer(config.train)
    state = state or create_state(config, vocabulary, optimizer, mesh)
    position = position or Position()
    train_step: Any = step.make_train_step(config, optimizer, state, mesh)
    reset_memory = step.make_reset_memory(state)
    streams = Streams(ids, config.train.batch_size, config.train.segment, config.seed)
    nats, z_LH = [], np.zeros(0)
    for _ in range(count):
        if position.fresh:
            state = reset_memory(state)
        segment, position = streams.take(position)
        state, metrics = train_step(state, sharding.place_segment(mesh, segment))
        nats.append(float(metrics.nats))
        z_LH = np.asarray(metrics.z_LH)
    assert train_step._cache_size() == 1, "compiled more than once"
    return Trained(np.array(nats), z_LH, state, position)
