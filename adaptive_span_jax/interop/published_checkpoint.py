"""A checkpoint file of the published PyTorch code ↔ arrays under published names. The only file that knows torch.

iter_no, scheduler_iter    iterations and updates so far
model                      weights; every name starts with `module.`; mask_template is a constant, not a weight. With
                           persistent vectors, the span is listed twice: also below persistent_memory
optimizer                  Adagrad's sums, numbered in the order of the weights, each listed once
logger                     curves for plotting, which are carried along
"""

import dataclasses
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.interop.published_weights import is_persistent
from adaptive_span_jax.runtime import storage
from adaptive_span_jax.runtime.command_line import install_command

_PREFIX = "module."
_TEMPLATE = "adaptive_span._mask.mask_template"

# Weights outside and inside layers, in the order of the published code.
_OUTER = ("key_pe", "in_emb.weight", "out_emb.weight", "out_emb.bias")
_SPAN = "adaptive_span._mask.current_val"
_IN_ATTENTION, _IN_PERSISTENT = "attn.attn.", "attn.attn.persistent_memory."
_PERSISTENT = (f"{_IN_PERSISTENT}key", f"{_IN_PERSISTENT}val")
_INNER = (
    *(f"attn.proj_{name}.weight" for name in ("query", "out", "val", "key")),
    *("norm1.weight", "norm1.bias"),
)
_FEEDFORWARD = (
    *("ff.fc1.weight", "ff.fc1.bias", "ff.fc2.weight", "ff.fc2.bias"),
    *("norm2.weight", "norm2.bias"),
)

# The parts of a file, in the order in which files made here have them.
_PARTS = ("iter_no", "model", "logger", "optimizer", "scheduler_iter")


@dataclasses.dataclass(frozen=True)
class PublishedCheckpoint:
    """The content of a published file; names are without their prefix."""

    weights: dict[str, np.ndarray]
    sums: dict[str, np.ndarray]  # Adagrad's
    updates: int
    iteration: int
    learning_rate: float
    clip: float
    logger: dict[str, Any]
    parts: tuple[str, ...] = _PARTS  # of the file, in order
    integer_steps: bool = False  # how the optimizer counts updates: old versions of PyTorch have no tensor for it


def read(path: Path) -> PublishedCheckpoint:
    """Reads a file; raises if it is not such a checkpoint or has another kind of model."""
    torch = _torch()
    try:
        # weights_only: otherwise a pickle can run arbitrary code.
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{path} is not a PyTorch checkpoint that torch.load(weights_only=True) accepts ({reason})"
        ) from error
    missing = {*_PARTS} - {"logger"} - set(found if isinstance(found, dict) else ())
    if missing:
        raise UserError(f"{path} is not a checkpoint of the published code: it has no {', '.join(sorted(missing))}")
    weights = {
        name.removeprefix(_PREFIX): tensor.numpy()
        for name, tensor in found["model"].items()
        if not name.endswith(_TEMPLATE)
    }
    for name in [name for name in weights if name.endswith(_IN_PERSISTENT + _SPAN)]:
        again, span = weights.pop(name), weights.get(name.replace(_IN_PERSISTENT, _IN_ATTENTION))
        if span is None or not np.array_equal(again, span):
            raise UserError(f"{path} has a span in {name} that differs from the one of the same layer's attention")
    _check_names(weights, path)
    # Numbered in the order of the model's weights.
    state, (group,) = found["optimizer"]["state"], found["optimizer"]["param_groups"]
    if sorted(state) != list(range(len(weights))):
        raise UserError(f"{path} has Adagrad sums for {len(state)} weights, but the model has {len(weights)}")
    sums = {name: state[number]["sum"].numpy() for number, name in enumerate(weights)}
    return PublishedCheckpoint(
        weights,
        sums,
        int(found["scheduler_iter"]),
        int(found["iter_no"]),
        float(group["lr"]),
        float(group["grad_clip"]),
        found.get("logger") or {},
        tuple(name for name in found if name in _PARTS),
        isinstance(state[0]["step"], int),
    )


def write(checkpoint: PublishedCheckpoint, path: Path) -> None:
    """Writes a file that the published code can read."""
    torch = _torch()
    names = _names(checkpoint.weights)
    limit = checkpoint.weights["key_pe"].shape[2]
    model = {}

    def put_span(module: str, span: np.ndarray) -> None:
        model[module + _SPAN] = _tensor(torch, span)
        model[module + _TEMPLATE] = torch.arange(1 - limit, 1, dtype=torch.float32)

    for name in names:
        if name.endswith(_SPAN):
            put_span(_PREFIX + name.removesuffix(_SPAN), checkpoint.weights[name])
            continue
        model[_PREFIX + name] = _tensor(torch, checkpoint.weights[name])
        layer = name.removesuffix(_PERSISTENT[-1])
        if layer != name and layer + _IN_ATTENTION + _SPAN in names:
            put_span(_PREFIX + layer + _IN_PERSISTENT, checkpoint.weights[layer + _IN_ATTENTION + _SPAN])
    updates = checkpoint.updates
    state = {
        number: {
            "step": updates if checkpoint.integer_steps else torch.tensor(float(updates)),
            "sum": _tensor(torch, checkpoint.sums[name]),
        }
        for number, name in enumerate(names)
    }
    group = {
        "lr": checkpoint.learning_rate,
        "grad_clip": checkpoint.clip,
        "lr_decay": 0,
        "weight_decay": 0,
        "params": list(range(len(names))),
    }
    content = {
        "iter_no": checkpoint.iteration,
        "model": model,
        "logger": checkpoint.logger,
        "optimizer": {"state": state, "param_groups": [group]},
        "scheduler_iter": checkpoint.updates,
    }
    try:
        with storage.replacing(path) as new:
            torch.save(
                {name: content[name] for name in checkpoint.parts}, new, _use_new_zipfile_serialization=False
            )  # as released; any torch reads it
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} cannot be written ({error})") from error


def _names(weights: dict[str, np.ndarray]) -> list[str]:
    """The names of a model of this size, in published order."""
    layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    span = _IN_ATTENTION + _SPAN
    inner = (span,) if f"layers.0.{span}" in weights else ()
    inner += (*_PERSISTENT, *_INNER) if is_persistent(weights) else (*_INNER, *_FEEDFORWARD)
    return [*_OUTER, *(f"layers.{layer}.{name}" for layer in range(layers) for name in inner)]


def _check_names(weights: dict[str, np.ndarray], path: Path) -> None:
    expected = set(_names(weights))
    strange, missing = sorted(set(weights) - expected), sorted(expected - set(weights))
    if any("_emb." in name for name in strange):
        raise UserError(
            f"{path} is a model with adaptive input and softmax ({_few(strange)}), as trained on words; only models "
            "with one embedding and one output layer are supported"
        )
    if strange or missing:
        raise UserError(f"{path} has another kind of model. Unknown: {_few(strange)}. Missing: {_few(missing)}")


def _few(names: list[str]) -> str:
    return (", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")) or "none"


def _tensor(torch: ModuleType, array: np.ndarray) -> Any:
    return torch.from_numpy(np.array(array, np.float32, order="C"))


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise UserError(
            f"PyTorch is required to read or write its checkpoints: run {install_command('torch')}"
        ) from error
    return torch
