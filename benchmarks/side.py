"""One side of the speed benchmark, as a separate process: reads commands, prints one line of JSON for each.

check      three steps without dropout: losses and gradient norms, to be compared with the other side
load       creates the state
train      the seconds of one training step
evaluate   the seconds of one segment with fixed weights
dense      the seconds of a step's dense products alone (ours)
memory     peak memory so far, in megabytes
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cases import STREAMS, VOCABULARY, make_config, segment, trained_z_LH  # noqa: E402
from benchmarks.child import serve  # noqa: E402
from configs import base  # noqa: E402

CHECKED_STEPS = 3


def _timed(run: Callable[[], Any]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed


def peak_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _ours(case: str, weights: Path) -> dict[str, Callable[[], Any]]:
    import jax

    from adaptive_span_jax.config import Config
    from adaptive_span_jax.data.segments import ScoredSegment, Segment
    from adaptive_span_jax.inference.decoder import CachedDecoder
    from adaptive_span_jax.inference.scoring import AT_ONCE, make_decoder_step
    from adaptive_span_jax.runtime import cpu, sharding
    from adaptive_span_jax.training import step
    from adaptive_span_jax.training.optimizer import make_optimizer
    from adaptive_span_jax.training.state import create_state

    cpu.use_cores(STREAMS)
    mesh = sharding.make_mesh()
    tokens_BT, targets_BT = segment(0)

    def prepare(dropout: float) -> tuple:
        config = Config.from_dict(make_config(case, dropout).to_dict())
        optimizer = make_optimizer(config.train)
        state = create_state(config, VOCABULARY, optimizer, mesh)
        if case == "trained":
            span = state.params["layers"]["attention"]["span"]
            old = span["span_fraction_H"]
            span["span_fraction_H"] = jax.device_put(
                (trained_z_LH() / config.span.limit).astype(old.dtype), old.sharding
            )
        return config, state, step.make_train_step(config, optimizer, state, mesh)

    def check() -> dict:
        _, state, train_step = prepare(0.0)
        np.savez(weights, allow_pickle=False, **by_path(state.params))  # pyrefly: ignore
        nats = []
        for number in range(CHECKED_STEPS):
            state, metrics = train_step(state, sharding.place_segment(mesh, Segment(*segment(number))))
            nats.append(float(metrics.nats))
        squares = by_path(state.opt_state[0].sum_of_squares)
        norms = {name: float(np.sqrt(leaf.astype(np.float64).sum())) for name, leaf in squares.items()}
        return {"nats": nats, "norms": norms}

    def load() -> None:
        box["config"], box["state"], box["train_step"] = prepare(config_dropout)

    def train() -> None:
        box["state"], metrics = box["train_step"](box["state"], placed)
        jax.block_until_ready((box["state"], metrics))

    def evaluate() -> None:
        # As `--mode=evaluate` does it: keys and values stay projected.
        if "decoder" not in box:
            box["decoder"] = decoder = CachedDecoder.of(box["config"], box["state"].params)
            box["decoder_step"] = make_decoder_step(decoder, mesh)
            box["cache"] = decoder.empty_cache(STREAMS, mesh)
            assert tokens_BT.shape[1] == AT_ONCE
        whole = sharding.place_segment(mesh, ScoredSegment(tokens_BT, targets_BT, scored_BT))
        box["cache"], box["found"] = box["decoder_step"](box["decoder"].weights, box["cache"], whole)
        jax.block_until_ready((box["cache"], box["found"]))

    box: dict[str, Any] = {}
    config_dropout = base.get_config().model.dropout
    placed = sharding.place_segment(mesh, Segment(tokens_BT, targets_BT))
    scored_BT = np.ones_like(tokens_BT, bool)
    return {
        "check": check,
        "load": load,
        "train": _timed(train),
        "evaluate": _timed(evaluate),
        "dense": _dense_seconds,
        "memory": peak_megabytes,
    }


def by_path(tree: Any) -> dict[str, np.ndarray]:
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def _dense_seconds() -> float:
    """How long the dense products of one step take alone, each as [rows, in] @ [in, out] of row-major arrays."""
    import jax

    config = base.get_config()
    width, inner, rows = config.model.width, config.model.feedforward, STREAMS * config.train.segment
    near = STREAMS * (config.train.segment + 64)
    forward = {(rows, width, width): 2, (near, width, width): 2, (rows, width, inner): 1, (rows, inner, width): 1}
    products: dict[tuple[int, int, int], int] = {}
    for (m, k, n), count in forward.items():
        # Forward, the gradient of the input, the gradient of the weight.
        for shape in ((m, k, n), (m, n, k), (k, m, n)):
            products[shape] = products.get(shape, 0) + count * config.model.layers
    for shape in (
        (rows, width, VOCABULARY),
        (rows, VOCABULARY, width),
        (width, rows, VOCABULARY),
    ):
        products[shape] = products.get(shape, 0) + 1
    total = 0.0
    for (m, k, n), count in products.items():
        product = jax.jit(lambda left, right: left @ right)
        arrays = jax.numpy.ones((m, k)), jax.numpy.ones((k, n))
        run = _timed(lambda product=product, arrays=arrays: jax.block_until_ready(product(*arrays)))
        run()
        total += count * median(run() for _ in range(7))
    return total


def _torch(case: str, weights: Path) -> dict[str, Callable[[], Any]]:
    from benchmarks.torch_reference import Reference

    tokens_BT, targets_BT = segment(0)
    box: dict[str, Reference] = {}

    def prepare(dropout: float) -> Reference:
        with np.load(weights) as arrays:
            return Reference(make_config(case, dropout).to_dict(), dict(arrays))

    def check() -> dict:
        reference = prepare(0.0)
        nats = [reference.train_step(*segment(number)) for number in range(CHECKED_STEPS)]
        return {"nats": nats, "norms": reference.gradient_norms()}

    def load() -> None:
        box["reference"] = prepare(base.get_config().model.dropout)

    return {
        "check": check,
        "load": load,
        "train": _timed(lambda: box["reference"].train_step(tokens_BT, targets_BT)),
        "evaluate": _timed(lambda: box["reference"].evaluate(tokens_BT, targets_BT)),
        "memory": peak_megabytes,
    }


if __name__ == "__main__":
    name, case, file = sys.argv[1:]
    serve(_ours(case, Path(file)) if name == "ours" else _torch(case, Path(file)))
