"""The plain model, an all-attention network and a sandwich of one size and budget, side by side.

    python benchmarks/family.py enwik8.zip [--workdir=runs/family] [--seeds 1 2]

Every run is an ordinary run of `configs/family.py` in WORKDIR/MODEL-SEED. The same command resumes, and skips finished
runs. Then one training step of each model is timed, in turns, with spans as at the start. Prints a row per model;
multiply-adds per token are the paper's count and what is executed, both with spans as at the start.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import Segment
from adaptive_span_jax.model import flops, transformer
from adaptive_span_jax.model.attention.inputs import FarShape
from adaptive_span_jax.runtime import cpu, sharding, terminal
from adaptive_span_jax.training import step
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import create_state
from benchmarks import runs
from configs.family import MODELS

SYMBOLS = 256
TURNS, STEPS = 12, 10  # steps that are timed together in a turn


def load(model: str) -> Config:
    """The config of a model."""
    return Config.from_dict(importlib.import_module("configs.family").get_config(model).to_dict())


def step_times(configs: dict[str, Config]) -> dict[str, float]:
    """Milliseconds of a training step at the initial spans: the median of turns, one model after the other."""
    cpu.use_cores(next(iter(configs.values())).train.batch_size)
    mesh = sharding.make_mesh()
    timed = {name: _timed(config, mesh) for name, config in configs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    for _ in range(TURNS):
        for name, run in timed.items():
            seconds[name].append(run())
    return {name: 1e3 * float(np.median(each)) for name, each in seconds.items()}


def _timed(config: Config, mesh: jax.sharding.Mesh) -> Callable[[], float]:
    """A function that trains some steps and returns the seconds of one; the first call here compiles."""
    optimizer = make_optimizer(config.train)
    state = create_state(config, SYMBOLS, optimizer, mesh)
    train_step = step.make_train_step(config, optimizer, state, mesh)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SYMBOLS, (2, config.train.batch_size, config.train.segment), np.int32)
    segment = sharding.place_segment(mesh, Segment(*tokens))

    def run() -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(STEPS):
            state, _ = train_step(state, segment)
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / STEPS

    run()
    return run


def _row(model: str, config: Config, results: list[dict[str, Any]], milliseconds: float, plain: float) -> list[str]:
    params = jax.eval_shape(lambda: transformer.init(config, SYMBOLS, jax.random.key(0)))

    def each(name: str, form: str) -> str:
        return " / ".join(format(result[name], form) for result in results)

    counted = flops.paper_flops(config, config.span.ramp)
    z_LH = jnp.zeros((config.model.layers, config.model.heads))
    executed = float(flops.executed_flops(config, z_LH, FarShape.on("cpu")))
    return [
        model,
        f"{transformer.parameter_count(params):,}",
        each("dev_bits", ".3f"),
        each("test_bits", ".3f"),
        each("average_span", ".1f"),
        each("longest_span", ".1f"),
        f"{counted / 1e6:.2f} / {executed / 1e6:.2f} M",
        f"{milliseconds:.1f} ms ({milliseconds / plain:.2f})",
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file or folder of text, read as bytes")
    parser.add_argument("--workdir", type=Path, default=Path("runs/family"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    arguments = parser.parse_args()
    workdir, path = arguments.workdir.resolve(), arguments.text.resolve()
    results: dict[str, list[dict[str, Any]]] = {model: [] for model in MODELS}
    for seed in arguments.seeds:
        for model in MODELS:
            fields = {"data.path": path, "seed": seed}
            results[model].append(runs.finish(f"family.py:{model}", workdir / f"{model}-{seed}", fields))
    configs = {model: load(model) for model in MODELS}
    times = step_times(configs)
    headings = ["model", "parameters", "dev", "test", "average span", "longest", "multiply-adds", "a step (of plain)"]
    rows = [_row(model, configs[model], results[model], times[model], times["plain"]) for model in MODELS]
    terminal.show_table(headings, rows)


if __name__ == "__main__":
    main()
