"""A checkpoint file of the published PyTorch code ↔ arrays under published names. The only file that knows torch.

iter_no, scheduler_iter    iterations and updates so far
model                      weights; every name starts with `module.`; mask_template is a constant, not a weight
optimizer                  Adagrad's sums, numbered in the order of the weights
logger                     curves for plotting, which are carried along
"""

import dataclasses
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import storage
from adaptive_span_jax.runtime.command_line import install_command

_PREFIX = "module."
_TEMPLATE = "attn.attn.adaptive_span._mask.mask_template"

# Weights outside and inside layers, in the order of the published code.
_OUTER = ("key_pe", "in_emb.weight", "out_emb.weight", "out_emb.bias")
_SPAN = "attn.attn.adaptive_span._mask.current_val"
_INNER = (
    *(f"attn.proj_{name}.weight" for name in ("query", "out", "val", "key")),
    *("norm1.weight", "norm1.bias", "ff.fc1.weight", "ff.fc1.bias", "ff.fc2.weight", "ff.fc2.bias"),
    *("norm2.weight", "norm2.bias"),
)


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
    missing = {"model", "optimizer", "scheduler_iter", "iter_no"} - set(found if isinstance(found, dict) else ())
    if missing:
        raise UserError(f"{path} is not a checkpoint of the published code: it has no {', '.join(sorted(missing))}")
    weights = {
        name.removeprefix(_PREFIX): tensor.numpy()
        for name, tensor in found["model"].items()
        if not name.endswith(_TEMPLATE)
    }
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
    )


def write(checkpoint: PublishedCheckpoint, path: Path) -> None:
    """Writes a file that the published code can read."""
    torch = _torch()
    names = _names(checkpoint.weights)
    limit = checkpoint.weights["key_pe"].shape[2]
    model = {}
    for name in names:
        model[_PREFIX + name] = _tensor(torch, checkpoint.weights[name])
        if name.endswith(_SPAN):
            layer = name.removesuffix(_SPAN)
            model[_PREFIX + layer + _TEMPLATE] = torch.arange(1 - limit, 1, dtype=torch.float32)
    state = {
        number: {"step": torch.tensor(float(checkpoint.updates)), "sum": _tensor(torch, checkpoint.sums[name])}
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
            torch.save(content, new, _use_new_zipfile_serialization=False)  # as released; any torch reads it
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} cannot be written ({error})") from error


def _names(weights: dict[str, np.ndarray]) -> list[str]:
    """The names of a model of this size, in published order."""
    layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
    adaptive = f"layers.0.{_SPAN}" in weights
    inner = (_SPAN, *_INNER) if adaptive else _INNER
    return [*_OUTER, *(f"layers.{layer}.{name}" for layer in range(layers) for name in inner)]


def _check_names(weights: dict[str, np.ndarray], path: Path) -> None:
    expected = set(_names(weights))
    strange, missing = sorted(set(weights) - expected), sorted(expected - set(weights))
    for part, kind in (
        ("persistent", "a persistent-memory model"),
        ("_emb.", "a model with adaptive input and softmax"),
    ):
        if any(part in name for name in strange):
            raise UserError(
                f"{path} is {kind} ({_few(strange)}); only plain adaptive- and fixed-span models are supported"
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
