"""A checkpoint of the published PyTorch code → a run of ours (`--mode=import-torch`), and back (`--mode=export-torch`).

Sizes are read from the tensors. What the file does not contain (ramp, segment, dropout, data, …) comes from a config,
by default `enwik8` or `text8`, depending on the number of symbols. The file has neither memory nor a position in the
text: training resumes with the optimizer's sums and the step, but with empty memory at the start of the text.
"""

import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.checkpoint.manager import CheckpointMetadata, Checkpoints
from adaptive_span_jax.config import Config
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.segments import Position
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference.loaded_model import READ_ONLY
from adaptive_span_jax.interop import published_checkpoint
from adaptive_span_jax.interop.published_checkpoint import PublishedCheckpoint
from adaptive_span_jax.interop.published_weights import from_published, is_persistent, to_published
from adaptive_span_jax.model.transformer import Params
from adaptive_span_jax.runtime import sharding, storage, strict_json
from adaptive_span_jax.runtime.command_line import CONFIGS
from adaptive_span_jax.training.optimizer import AdagradState, make_optimizer
from adaptive_span_jax.training.state import TrainState, abstract_state, create_state, restore_state, to_trees

# Fields of a published file that a run does not have; kept so that exporting restores the file exactly.
_EXTRA = "published.json"
_CARRIED = ("logger", "parts", "integer_steps")


def from_torch(file: Path, directory: Path, fields: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> Config:
    """Creates a run with one checkpoint from the file; returns the run's config.

    `fields`: a config for what the file does not contain, or None; `changes`: fields set on the command line.
    """
    if (directory / "checkpoints").exists():
        raise UserError(f"--workdir={directory} already has checkpoints; use a new directory")
    published = published_checkpoint.read(file)
    symbols, _ = published.weights["in_emb.weight"].shape
    config = _config(published, fields, changes)
    workdir.make_workdir(directory)
    corpus = corpora.load(config.data)
    if len(corpus.vocabulary) != symbols:
        raise UserError(
            f"{file} has {symbols} symbols, but the text (config.data.source={config.data.source}) has "
            f"{len(corpus.vocabulary)}; use the text that it was trained on"
        )
    mesh = sharding.make_mesh(jax.devices()[:1])
    optimizer = make_optimizer(config.train)
    state = create_state(config, symbols, optimizer, mesh)
    params, sums = (_placed(arrays, config, state.params) for arrays in (published.weights, published.sums))
    step = jax.device_put(np.int32(published.updates), state.step.sharding)
    opt_state: Any = optax.tree.set(state.opt_state, count=step, sum_of_squares=sums)
    vocabulary = corpora.vocabulary_text(corpus.vocabulary)
    about = CheckpointMetadata(
        published.updates,
        Position(),
        0.0,
        corpus.fingerprint,
        vocabulary,
        strict_json.loads(config.to_json()),
    )
    with Checkpoints(directory / "checkpoints", config.checkpoint) as checkpoints:
        checkpoints.save(to_trees(TrainState(step, params, opt_state, state.memory)), about)
        checkpoints.finish()
    workdir.write_config(directory, config)
    extra = {name: getattr(published, name) for name in ("updates", "iteration", *_CARRIED)}
    storage.write_text(directory / _EXTRA, strict_json.dumps(extra, default=str) + "\n")
    return config


def to_torch(file: Path, directory: Path, which: str) -> int:
    """Writes a run's checkpoint in the published format; returns its step."""
    if not (directory / "checkpoints").is_dir():
        raise UserError(f"--workdir={directory} has no checkpoints; pass the workdir of a run")
    checkpoints = Checkpoints(directory / "checkpoints", READ_ONLY)
    saved = checkpoints.describe(checkpoints.choose(which))
    config = Config.from_dict(saved.config)
    if config.span.kind == "dynamic":
        raise UserError(f"--workdir={directory} has dynamic spans, which the published code does not support")
    mesh = sharding.make_mesh(jax.devices()[:1])
    abstract = abstract_state(config, len(saved.vocabulary), make_optimizer(config.train), mesh)
    state = jax.device_get(restore_state(checkpoints, saved.step, abstract))
    adagrad = next(part for part in state.opt_state if isinstance(part, AdagradState))
    sums: Any = adagrad.sum_of_squares
    iteration = saved.step - 1
    carried: dict[str, Any] = {"logger": {}}
    if (directory / _EXTRA).exists():
        extra = strict_json.loads((directory / _EXTRA).read_text())
        # The number of updates per published iteration, to continue its count.
        each = max(extra["updates"] // (extra["iteration"] + 1), 1)
        iteration = extra["iteration"] + (saved.step - extra["updates"]) // each
        carried = {name: extra[name] for name in _CARRIED if name in extra}  # earlier versions kept only the logger
    published = PublishedCheckpoint(
        to_published(state.params),
        to_published(sums),
        saved.step,
        iteration,
        config.train.learning_rate,
        config.train.clip,
        **carried,
    )
    published_checkpoint.write(published, file)
    return saved.step


def _config(published: PublishedCheckpoint, fields: Mapping[str, Any] | None, changes: Mapping[str, Any]) -> Config:
    """The run's config."""
    weights = published.weights
    symbols, width = weights["in_emb.weight"].shape
    _, head_width, limit = weights["key_pe"].shape
    if fields is None:
        known = {205: "enwik8", 28: "text8"}
        if symbols not in known:
            raise UserError(
                f"the checkpoint has {symbols} symbols, so it was not trained on enwik8 (205) or text8 (28); "
                "pass a config with its text: --config=bytes --config.data.path=FILE"
            )
        fields = runpy.run_path(str(CONFIGS / f"{known[symbols]}.py"))["get_config"]().to_dict()
    sizes: dict[str, Any] = {
        "model.layers": len({name.split(".")[1] for name in weights if name.startswith("layers.")}),
        "model.width": width,
        "model.heads": width // head_width,
        **_inner_size(weights),
        "span.kind": "adaptive" if any("adaptive_span" in name for name in weights) else "fixed",
        "span.limit": limit,
        "train.learning_rate": published.learning_rate,
        "train.clip": published.clip,
    }
    for name, value in changes.items():
        if name in sizes and value != sizes[name]:
            raise UserError(f"--config.{name}={value} contradicts the checkpoint, in which {name} is {sizes[name]}")
    return Config().changed(_flat(fields) | dict(changes) | sizes)


def _inner_size(weights: Mapping[str, np.ndarray]) -> dict[str, int]:
    if is_persistent(weights):
        return {"model.persistent": weights["layers.0.attn.attn.persistent_memory.key"].shape[2]}
    return {"model.feedforward": weights["layers.0.ff.fc1.weight"].shape[0], "model.persistent": 0}


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Nested fields → {full name: value}."""
    return {
        f"{section}.{name}" if name else section: value
        for section, values in fields.items()
        for name, value in (values.items() if isinstance(values, Mapping) else [("", values)])
    }


def _placed(arrays: dict[str, np.ndarray], config: Config, like: Params) -> Params:
    """Our parameters from arrays under published names, with the shardings of `like`."""
    params = from_published(arrays, config.model.heads)
    return jax.tree.map(lambda leaf, at: jax.device_put(np.asarray(leaf, at.dtype), at.sharding), params, like)
