"""The device state that a train step changes, and how it is created: shapes, then shardings, then values."""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import transformer
from adaptive_span_jax.model.memory import Memory, memory_sharding
from adaptive_span_jax.runtime import sharding, terminal

# 16 TiB is far more than any run of this model needs, so a larger size is a typo.
_LARGEST_BYTES = 2**44
_SIZES = ("model.layers", "model.width", "model.feedforward", "model.persistent", "span.limit", "train.batch_size")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state between two steps. The position in the text is kept separately, on the host."""

    step: jax.Array
    params: transformer.Params
    opt_state: Any
    memory: Memory


def abstract_state(config: Config, vocabulary: int, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state's shapes, dtypes and shardings, without values; raises if the size is unreasonable."""
    _check_size(config, max(operator.attrgetter(name)(config) for name in _SIZES))  # too large for eval_shape
    shapes = jax.eval_shape(lambda: _init(config, vocabulary, optimizer))
    _check_size(config, sharding.total_bytes(shapes))
    shardings = dataclasses.replace(
        jax.tree_util.tree_map_with_path(
            lambda path, leaf: sharding.param_sharding(mesh, leaf.shape, _stacked(path)), shapes
        ),
        memory=memory_sharding(mesh, config.train.batch_size),
    )
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, shardings)


def create_state(config: Config, vocabulary: int, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state before the first step, created directly with its shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, vocabulary, optimizer, mesh))
    return jax.jit(lambda: _init(config, vocabulary, optimizer), out_shardings=shardings)()


def _init(config: Config, vocabulary: int, optimizer: optax.GradientTransformation) -> TrainState:
    params = transformer.init(config, vocabulary, jax.random.key(config.seed))
    memory = transformer.init_memory(config, config.train.batch_size)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), memory)


def _check_size(config: Config, needed: int) -> None:
    if needed > _LARGEST_BYTES:
        values = (f"config.{name} is {operator.attrgetter(name)(config):,}" for name in _SIZES)
        raise UserError(
            f"parameters, optimizer state and memory would take at least {terminal.size(needed)}: "
            f"{', '.join(values)}; reduce the one that is wrong"
        )


def _stacked(path: tuple) -> bool:
    """Whether a parameter, or its optimizer state, has a leading axis of layers."""
    return any(getattr(key, "key", None) == transformer.LAYERS for key in path)


def to_trees(state: TrainState) -> dict[str, Any]:
    """The state's arrays under their names in checkpoints."""
    return {"params": state.params, "optimizer": state.opt_state, "memory": state.memory}


def restore_state(checkpoints: Checkpoints, step: int, abstract: TrainState) -> TrainState:
    """The state of a checkpoint, with the shardings of `abstract`; raises if it has parameters only."""
    wanted = to_trees(abstract)
    if missing := sorted(wanted.keys() - checkpoints.names(step)):
        raise UserError(
            f"the checkpoint of step {step:,} has no {' and no '.join(missing)}, so it cannot be resumed; start a new "
            "run from its weights with --config.init_from=WORKDIR --workdir=NEW"
        )
    trees = checkpoints.restore(step, wanted)
    number = jax.device_put(np.asarray(step, abstract.step.dtype), abstract.step.sharding)
    return TrainState(number, trees["params"], trees["optimizer"], trees["memory"])
