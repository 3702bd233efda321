"""A checkpoint of the published PyTorch code → a run of ours, and back.

    python -m adaptive_span_jax.convert reference.pt --workdir=DIR                 evaluate, generate, train on
    python -m adaptive_span_jax.convert new.pt --workdir=DIR --to-torch            the way back

Sizes are read off the tensors. What the file does not say (ramp, segment, dropout, data, …) comes from a config, by
default configs/enwik8.py or configs/text8.py by the number of symbols; --set changes a field of it. The file holds
neither memory nor a place in the text: training goes on with empty memory at the start of the text, with the
optimizer's sums and the step.
"""

import argparse
import ast
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from adaptive_span_jax import corpus as corpora
from adaptive_span_jax import display, published_checkpoint, sharding, storage, strict_json, workdir
from adaptive_span_jax.checkpoint import Checkpoints, Saved
from adaptive_span_jax.command_line import command
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import Params
from adaptive_span_jax.optimizer import AdagradState, make_optimizer
from adaptive_span_jax.published_checkpoint import PublishedCheckpoint
from adaptive_span_jax.published_weights import from_published, to_published
from adaptive_span_jax.segments import Position
from adaptive_span_jax.train_state import TrainState, abstract_state, create_state
from adaptive_span_jax.trained_model import READ_ONLY

# What a published file has and a run of ours has no place for, so that the way back is exact.
_EXTRA = "published.json"


def from_torch(file: Path, directory: Path, config_file: Path | None, changes: list[str]) -> None:
    """Makes a run with one checkpoint, that of the file."""
    if (directory / "checkpoints").exists():
        raise UserError(f"--workdir={directory} has checkpoints already; name a new directory")
    published = published_checkpoint.read(file)
    symbols, width = published.weights["in_emb.weight"].shape
    config = _config(published, config_file, changes)
    workdir.make_workdir(directory)
    corpus = corpora.load(config.data)
    if len(corpus.vocabulary) != symbols:
        raise UserError(
            f"{file} knows {symbols} symbols, but the text (config.data.source={config.data.source}) has "
            f"{len(corpus.vocabulary)}; name the text that it was trained on"
        )
    mesh = sharding.make_mesh(jax.devices()[:1])
    optimizer = make_optimizer(config.train)
    state = create_state(config, symbols, optimizer, mesh)
    params, sums = (_placed(arrays, config, state.params) for arrays in (published.weights, published.sums))
    step = jax.device_put(np.int32(published.updates), state.step.sharding)
    opt_state: Any = optax.tree.set(state.opt_state, count=step, sum_of_squares=sums)
    vocabulary = b"".join(corpus.vocabulary).decode("latin-1")
    about = Saved(
        published.updates,
        Position(),
        0.0,
        corpus.fingerprint,
        vocabulary,
        strict_json.loads(config.to_json()),
    )
    with Checkpoints(directory / "checkpoints", config.checkpoint) as checkpoints:
        checkpoints.save(TrainState(step, params, opt_state, state.memory), about)
        checkpoints.finish()
    workdir.write_config(directory, config)
    extra = {"updates": published.updates, "iteration": published.iteration, "logger": published.logger}
    (directory / _EXTRA).write_text(strict_json.dumps(extra, default=str) + "\n")
    display.show_block(
        f"Converted {file}",
        {
            "model": f"{display.counted(config.model.layers, 'layer')} of width {width}, "
            f"{display.counted(config.model.heads, 'head')}, {config.span.kind} spans of at most "
            f"{display.counted(config.span.limit, 'position')}, {symbols} symbols",
            "step": f"{published.updates:,}; memory is empty and the text starts over",
            "taken from the config": f"ramp {config.span.ramp}, segment {config.train.segment}, dropout "
            f"{config.model.dropout}, penalty {config.span.penalty}",
            "evaluate it": command(directory, mode="evaluate"),
            "train on": command(directory),
        },
    )


def to_torch(file: Path, directory: Path, which: str) -> None:
    """Writes a run's checkpoint as the published code does."""
    if not (directory / "checkpoints").is_dir():
        raise UserError(f"--workdir={directory} has no checkpoints; name the workdir of a run")
    checkpoints = Checkpoints(directory / "checkpoints", READ_ONLY)
    saved = checkpoints.describe(checkpoints.choose(which))
    config = Config.from_dict(saved.config)
    if config.span.kind == "dynamic":
        raise UserError(f"--workdir={directory} has dynamic spans, which the published code does not know")
    mesh = sharding.make_mesh(jax.devices()[:1])
    abstract = abstract_state(config, len(saved.vocabulary), make_optimizer(config.train), mesh)
    state = jax.device_get(checkpoints.restore(saved.step, abstract))
    adagrad = next(part for part in state.opt_state if isinstance(part, AdagradState))
    sums: Any = adagrad.sum_of_squares
    iteration, logger = saved.step - 1, {}
    if (directory / _EXTRA).exists():
        extra = strict_json.loads((directory / _EXTRA).read_text())
        # Published iterations are so many updates each; counting goes on in the same way.
        each = max(extra["updates"] // (extra["iteration"] + 1), 1)
        iteration, logger = extra["iteration"] + (saved.step - extra["updates"]) // each, extra["logger"]
    published = PublishedCheckpoint(
        to_published(state.params),
        to_published(sums),
        saved.step,
        iteration,
        config.train.learning_rate,
        config.train.clip,
        logger,
    )
    published_checkpoint.write(published, file)
    display.say(f"{file}: step {saved.step:,} of {directory}, as the published code writes it")


def _config(published: PublishedCheckpoint, config_file: Path | None, changes: list[str]) -> Config:
    """The run's config."""
    weights = published.weights
    symbols, width = weights["in_emb.weight"].shape
    _, head_width, limit = weights["key_pe"].shape
    known = {205: "enwik8", 28: "text8"}
    if config_file is None and symbols not in known:
        raise UserError(
            f"the checkpoint has {symbols} symbols, so it was not trained on enwik8 (205) or text8 (28); "
            "name a config with its text: --config=configs/bytes.py --set data.path=FILE"
        )
    config_file = config_file or Path("configs") / f"{known[symbols]}.py"
    if not config_file.is_file():
        raise UserError(f"--config={config_file}: no such file; run this from the project's directory, or name another")
    fields = runpy.run_path(str(config_file))["get_config"]().to_dict()
    adaptive = any("adaptive_span" in name for name in weights)
    sizes: dict[str, Any] = {
        "model.layers": len({name.split(".")[1] for name in weights if name.startswith("layers.")}),
        "model.width": width,
        "model.heads": width // head_width,
        "model.feedforward": weights["layers.0.ff.fc1.weight"].shape[0],
        "span.kind": "adaptive" if adaptive else "fixed",
        "span.limit": limit,
        "train.learning_rate": published.learning_rate,
        "train.clip": published.clip,
    }
    for change in changes:
        name, equals, value = change.partition("=")
        section, _, field = name.partition(".")
        if not equals or field not in fields.get(section, ()):
            raise UserError(f"--set {change}: it must be a field of configs/base.py and a value, e.g. span.ramp=32")
        if name in sizes:
            raise UserError(f"--set {change}: the checkpoint itself says that {name} is {sizes[name]}")
        sizes[name] = value if isinstance(fields[section][field], str) else _value(change, value)
    for name, value in sizes.items():
        section, _, field = name.partition(".")
        fields[section][field] = value
    return Config.from_dict(fields)


def _value(change: str, value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise UserError(f"--set {change}: {value!r} is not a number") from error


def _placed(arrays: dict[str, np.ndarray], config: Config, like: Params) -> Params:
    """Arrays under published names as parameters of ours."""
    params = from_published(arrays, config.model.heads)
    return jax.tree.map(lambda leaf, at: jax.device_put(np.asarray(leaf, at.dtype), at.sharding), params, like)


def main(arguments: list[str]) -> int:
    """Reads the command line; answers the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m adaptive_span_jax.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="the PyTorch checkpoint: read, or with --to-torch written")
    parser.add_argument("--workdir", required=True, help="the run: written, or with --to-torch read")
    parser.add_argument("--to-torch", action="store_true", help="from the run to PyTorch")
    parser.add_argument("--step", default="latest", help="--to-torch: latest, best or a step")
    parser.add_argument("--config", type=Path, help="what the file does not say, a file of configs/")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="a field of the config, repeatedly"
    )
    options = parser.parse_args(arguments)
    try:
        directory = storage.place(options.workdir)
        if options.to_torch:
            to_torch(options.file, directory, options.step)
        else:
            from_torch(options.file, directory, options.config, options.set)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
