"""One side of `same_curve.py`, as a separate process, see child.py.

train N     trains N steps; the loss of each, in nats, and the seconds they took
dev         bits per byte of the first tokens of dev, by the published protocol
save FILE   writes the state between two steps; `load FILE` restores it
weights     writes the initial weights for the other side (ours)
memory      peak memory so far, in megabytes
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.config import Config
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.segments import Position, Streams, whole_segments
from benchmarks.child import serve
from benchmarks.side import by_path, peak_megabytes


def _ours(config: Config, initial: Path) -> dict[str, Callable[..., Any]]:
    import jax

    from adaptive_span_jax.runtime import cpu, sharding
    from adaptive_span_jax.training import step
    from adaptive_span_jax.training.evaluation import score
    from adaptive_span_jax.training.optimizer import make_optimizer
    from adaptive_span_jax.training.state import create_state

    cpu.use_cores(config.train.batch_size)
    mesh = sharding.make_mesh()
    corpus = corpora.load(config.data)
    streams = Streams(corpus.train, config.train.batch_size, config.train.segment, config.seed)
    optimizer = make_optimizer(config.train)
    state = create_state(config, len(corpus.vocabulary), optimizer, mesh)
    train_step = step.make_train_step(config, optimizer, state, mesh)
    eval_step = step.make_eval_step(config, mesh)
    box: dict[str, Any] = {"state": state}

    def train(count: str) -> dict[str, Any]:
        position, nats = _position(config, int(box["state"].step)), []
        started = time.perf_counter()
        for _ in range(int(count)):
            segment, position = streams.take(position)
            box["state"], metrics = train_step(box["state"], sharding.place_segment(mesh, segment))
            nats.append(float(metrics.nats))
        return {"nats": nats, "seconds": time.perf_counter() - started}

    def dev() -> float:
        ids = corpus.dev[: config.evaluate.max_tokens]
        return score(config, box["state"].params, ids, "published", eval_step, mesh).bits

    def save(file: str) -> None:
        np.savez(file, **by_path(box["state"]))  # pyrefly: ignore

    def load(file: str) -> None:
        with np.load(file) as arrays:
            names = list(by_path(box["state"]))
            leaves, tree = jax.tree.flatten(box["state"])
            restored = [jax.device_put(arrays[name], leaf.sharding) for name, leaf in zip(names, leaves, strict=True)]
            box["state"] = jax.tree.unflatten(tree, restored)

    def weights() -> None:
        np.savez(initial, **by_path(box["state"].params))  # pyrefly: ignore

    return {"train": train, "dev": dev, "save": save, "load": load, "weights": weights, "memory": peak_megabytes}


def _torch(config: Config, weights: Path) -> dict[str, Callable[..., Any]]:
    import torch

    from benchmarks.torch_reference import Reference

    corpus = corpora.load(config.data)
    streams = Streams(corpus.train, config.train.batch_size, config.train.segment, config.seed)
    with np.load(weights) as arrays:
        reference = Reference(dataclasses.asdict(config), dict(arrays))

    def train(count: str) -> dict[str, Any]:
        position, nats = _position(config, reference.updates), []
        started = time.perf_counter()
        for _ in range(int(count)):
            segment, position = streams.take(position)
            nats.append(reference.train_step(*segment))
        return {"nats": nats, "seconds": time.perf_counter() - started}

    def dev() -> float:
        memory = reference.memory_LBMD
        reference.reset_memory()
        ids = corpus.dev[: config.evaluate.max_tokens]
        segments = whole_segments(ids, config.evaluate.batch_size, config.train.segment)
        nats = [reference.evaluate(segment.tokens_BT, segment.targets_BT) for segment in segments]
        reference.memory_LBMD = memory
        return float(np.mean(nats) / np.log(2))

    def save(file: str) -> None:
        torch.save({name: vars(reference)[name] for name in _STATE}, file)

    def load(file: str) -> None:
        vars(reference).update(torch.load(file))

    return {"train": train, "dev": dev, "save": save, "load": load, "memory": peak_megabytes}


# What changes in a `Reference` from step to step.
_STATE = ("weights", "squares", "updates", "memory_LBMD")


def _position(config: Config, steps: int) -> Position:
    """The position after some steps of the first epoch."""
    return Position(0, steps * config.train.segment, fresh=steps == 0)


if __name__ == "__main__":
    name, fields, weights = sys.argv[1:]
    read = Config.from_dict(json.loads(Path(fields).read_text()))
    serve(_ours(read, Path(weights)) if name == "ours" else _torch(read, Path(weights)))
