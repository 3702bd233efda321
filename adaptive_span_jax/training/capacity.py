"""Checks whether training fits into memory before anything is allocated."""

from typing import Any

import jax
from jax.sharding import Mesh

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import transformer
from adaptive_span_jax.model.memory import memory_sharding
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.runtime.capacity import activation_bytes, check, model_fields, named_fields, placed
from adaptive_span_jax.training.state import TrainState


def check_training(config: Config, state: TrainState, mesh: Mesh) -> None:
    """Raises if training from the abstract `state` needs more memory than there is."""
    train, streams = config.train, config.evaluate.batch_size
    vocabulary = state.params["embedding_VD"].shape[0]
    state_bytes, memory_bytes = sharding.bytes_per_device(state), sharding.bytes_per_device(state.memory)
    kept_layers = 1 if config.model.remat else config.model.layers
    size_fields = model_fields(config)
    memory_fields = named_fields(config, "span.limit", "model.layers", "model.width")
    batch_fields = named_fields(config, "train.batch_size", "train.segment")
    parameters = {
        f"parameters and optimizer state ({size_fields}, {named_fields(config, 'span.limit')})": state_bytes
        - memory_bytes
    }
    memory = {f"segment memory ({named_fields(config, 'train.batch_size')}, {memory_fields})": memory_bytes}
    step = {
        f"gradients ({size_fields})": sharding.bytes_per_device(state.params),
        f"activations ({batch_fields}, {size_fields})": activation_bytes(
            config, mesh, train.batch_size, train.segment, vocabulary, kept_layers, train.grad_accum_steps
        ),
    }
    check(mesh, "training", parameters | memory | step)
    # Evaluation runs between two steps: the state is alive, gradients and activations are not.
    shapes: Any = jax.eval_shape(lambda: transformer.init_memory(config, streams))
    memory_here = jax.tree.map(placed, shapes, memory_sharding(mesh, streams))
    streams_fields = named_fields(config, "evaluate.batch_size")
    evaluation = {
        f"segment memory of the evaluation ({streams_fields}, {memory_fields})": sharding.bytes_per_device(memory_here),
        f"activations ({streams_fields}, {named_fields(config, 'train.segment')}, {size_fields})": activation_bytes(
            config, mesh, streams, train.segment, vocabulary
        ),
    }
    check(mesh, "evaluation during training", parameters | memory | evaluation)
