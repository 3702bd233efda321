"""Whether what was asked fits into memory, estimated from shapes before anything is allocated.

The estimates are lower bounds: arrays that are certainly there at the same time, not the compiler's temporaries, which
are as large again or more. So a refusal is certain, and what is not refused may still be too much. `--mode=plan` knows
more, but compiles.
"""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from adaptive_span_jax import model, sharding
from adaptive_span_jax.config import Config
from adaptive_span_jax.display import size
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.finished_model import FinishedModel
from adaptive_span_jax.train_state import TrainState

# What a container may use, by both versions of Linux's control groups.
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check_training(config: Config, state: TrainState, mesh: Mesh) -> None:
    """Refuses a training, `state` being its abstract state, that needs more memory than there is."""
    train, streams = config.train, config.evaluate.streams
    vocabulary = state.params["embedding_VD"].shape[0]
    state_bytes, memory_bytes = sharding.bytes_per_device(state), sharding.bytes_per_device(state.memory)
    kept_layers = 1 if config.model.remat else config.model.layers
    model_fields = _fields(config, "model.layers", "model.width", "model.feedforward")
    memory_fields = _fields(config, "span.limit", "model.layers", "model.width")
    batch_fields = _fields(config, "train.batch_size", "train.segment")
    parameters = {
        f"parameters and optimizer state ({model_fields}, {_fields(config, 'span.limit')})": state_bytes - memory_bytes
    }
    memory = {f"segment memory ({_fields(config, 'train.batch_size')}, {memory_fields})": memory_bytes}
    step = {
        f"gradients ({model_fields})": sharding.bytes_per_device(state.params),
        f"activations ({batch_fields}, {model_fields})": _activations(
            config, mesh, train.batch_size, train.segment, vocabulary, kept_layers, train.batch_split
        ),
    }
    _check(mesh, "training", parameters | memory | step)
    # Evaluation comes between two steps: the state stays, gradients and activations are gone.
    shapes: Any = jax.eval_shape(lambda: model.init_memory(config, streams))
    placed = jax.tree.map(_placed, shapes, sharding.memory_sharding(mesh, streams))
    streams_fields = _fields(config, "evaluate.streams")
    evaluation = {
        f"segment memory of the evaluation ({streams_fields}, {memory_fields})": sharding.bytes_per_device(placed),
        f"activations ({streams_fields}, {_fields(config, 'train.segment')}, {model_fields})": _activations(
            config, mesh, streams, train.segment, vocabulary
        ),
    }
    _check(mesh, "evaluation during training", parameters | memory | evaluation)


def check_reading(finished: FinishedModel, streams: int, positions: int, mesh: Mesh, field: str) -> None:
    """Refuses more streams, `positions` read at once, than a finished model has memory for; `field` sets them."""
    config = finished.config
    shapes = jax.eval_shape(lambda: finished.cache_of(streams, 0))
    cache = jax.tree.map(_placed, shapes, _broadcast(finished.cache_sharding(streams, mesh), shapes))
    vocabulary = finished.weights["embedding_VD"].shape[0]
    sizes = _fields(config, "model.layers", "model.width", "model.feedforward")
    _check(
        mesh,
        f"{field} = {streams}",
        {
            f"parameters ({sizes}, {_fields(config, 'span.limit')})": sharding.total_bytes(finished.weights),
            f"keys and values ({field} = {streams}, {_fields(config, 'model.layers', 'model.width')}, and the spans of "
            f"the heads, at most {_fields(config, 'span.limit')})": sharding.bytes_per_device(cache),
            f"activations ({field} = {streams}, {sizes})": _activations(config, mesh, streams, positions, vocabulary),
        },
    )


def _check(mesh: Mesh, what: str, parts: dict[str, int]) -> None:
    """Refuses `parts`, bytes on each device by what they are for, that are more than this process's devices have."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        here, available, where = len(devices), _machine_bytes(), "this machine has"
    else:
        stats = devices[0].memory_stats() or {}
        here, available, where = 1, stats.get("bytes_limit"), f"a {devices[0].device_kind} has"
    needed = here * sum(parts.values())
    if available is None or needed <= available:
        return
    each = [f"{size(here * count)} {name}" for name, count in sorted(parts.items(), key=lambda part: -part[1])]
    raise UserError(
        f"{what} needs at least {size(needed)} of memory, {where} {size(available)}:\n  "
        + "\n  ".join(each)
        + "\nMake the fields of the largest part smaller"
    )


def _machine_bytes() -> int | None:
    """The physical memory, or what the container may use of it."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CONTAINER_LIMITS:
        if path.is_file() and (limit := path.read_text().strip()).isdecimal():  # or "max"
            found.append(int(limit))
    return min(found)


def _activations(
    config: Config, mesh: Mesh, streams: int, positions: int, vocabulary: int, kept_layers: int = 1, groups: int = 1
) -> int:
    """Bytes on one device: every layer's input, and of each group of streams feed-forward states and logits."""
    sizes = config.model
    by_stream = sharding.by_stream(mesh, streams)
    (here,) = by_stream.shard_shape((streams,))
    rows = here * sizes.layers * sizes.width + here // groups * (kept_layers * sizes.feedforward + vocabulary)
    return positions * rows * jnp.dtype(sizes.compute_dtype).itemsize


def _fields(config: Config, *names: str) -> str:
    """The fields as they are written on the command line, with their values."""
    values = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in names}
    return ", ".join(f"config.{name} = {value}" for name, value in values.items())


def _placed(shape: jax.ShapeDtypeStruct, at: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=at)


def _broadcast(prefix: Any, tree: Any) -> Any:
    """A tree of shardings that has one for whole branches, with one for every leaf."""
    return jax.tree.map(lambda at, branch: jax.tree.map(lambda _: at, branch), prefix, tree)
