"""Training speed of the small model, ours against the published algorithm in PyTorch, on this machine's CPU cores.

    pip install -r requirements-benchmark.txt
    python benchmarks/train_speed.py [--json] [--rounds 5] [--cases start,trained,fixed]

12 layers, width 512, segment 512, 4 streams, dropout 0.3, float32; a step is forward, backward and optimizer. Cases:

    start    S = 8192, every span at 0, as training begins
    trained  S = 8192, the spans in trained_spans.json: 21 long heads of 96, up to 5,600 positions, average span 314
    fixed    every head 2048

Each side is a process of its own, so that peak memory is measured per side, and they take turns step by step. Before
anything is timed, three steps without dropout must give the same loss and the same gradient norm of every parameter on
both sides. Ratios are of medians. For `start` it also says which share of our step its dense products alone would take.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from configs import base  # noqa: E402

CASES = ("start", "trained", "fixed")
STREAMS = 4
VOCABULARY = 205
CHECKED_STEPS = 3
# Three steps from equal weights, in float32, with sums in different order.
TOLERANCE = 2e-3


def make_config(case: str, dropout: float) -> Any:
    """The config of a case. Warm-up is as published, so spans hardly move while they are timed."""
    config = base.get_config()
    config.train.batch_size = STREAMS
    config.model.dropout = dropout
    if case == "fixed":
        config.span.update(kind="fixed", limit=2048)
    return config


def segment(number: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens_BT, targets_BT), the same for both sides."""
    config = base.get_config()
    ids = np.random.default_rng(number).integers(0, VOCABULARY, (STREAMS, config.train.segment + 1), np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


class Side:
    """A child process that runs one of the two implementations and answers one line of JSON per command."""

    def __init__(self, name: str, case: str, weights: Path):
        command = [sys.executable, __file__, "--serve", name, "--cases", case, "--weights", str(weights)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command: str) -> Any:
        """Runs a command to its end."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process for {self._process.args} ended early; its message is above")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def serve(name: str, case: str, weights: Path) -> None:
    """Answers commands from standard input until it ends."""
    commands = _ours(case, weights) if name == "ours" else _torch(case, weights)
    for line in sys.stdin:
        print(json.dumps(commands[line.strip()]()), flush=True)


def _timed(run: Callable[[], Any]) -> Callable[[], float]:
    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return timed


def _peak_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def _ours(case: str, weights: Path) -> dict[str, Callable[[], Any]]:
    import jax

    from adaptive_span_jax import model, sharding, step
    from adaptive_span_jax.config import Config
    from adaptive_span_jax.optimizer import make_optimizer
    from adaptive_span_jax.segments import ScoredSegment, Segment
    from adaptive_span_jax.train_state import create_state

    mesh = sharding.make_mesh()
    tokens_BT, targets_BT = segment(0)

    def prepare(dropout: float) -> tuple:
        config = Config.from_dict(make_config(case, dropout).to_dict())
        optimizer = make_optimizer(config.train)
        state = create_state(config, VOCABULARY, optimizer, mesh)
        if case == "trained":
            z_LH = np.array(json.loads((Path(__file__).parent / "trained_spans.json").read_text())["z_LH"])
            span = state.params["layers"]["attention"]["span"]
            old = span["span_fraction_H"]
            span["span_fraction_H"] = jax.device_put((z_LH / config.span.limit).astype(old.dtype), old.sharding)
        return config, state, step.make_train_step(config, optimizer, state, mesh)

    def check() -> dict:
        _, state, train_step = prepare(0.0)
        np.savez(weights, allow_pickle=False, **_by_path(state.params))  # pyrefly: ignore
        nats = []
        for number in range(CHECKED_STEPS):
            state, metrics = train_step(state, sharding.place_segment(mesh, Segment(*segment(number))))
            nats.append(float(metrics.nats))
        squares = _by_path(state.opt_state[0].sum_of_squares)
        norms = {name: float(np.sqrt(leaf.astype(np.float64).sum())) for name, leaf in squares.items()}
        return {"nats": nats, "norms": norms}

    def load() -> None:
        config, box["state"], box["train_step"] = prepare(config_dropout)
        box["eval_step"] = step.make_eval_step(config, mesh)
        box["memory"] = jax.jit(
            lambda: model.init_memory(config, STREAMS), out_shardings=sharding.memory_sharding(mesh, STREAMS)
        )

    def train() -> None:
        box["state"], metrics = box["train_step"](box["state"], placed)
        jax.block_until_ready((box["state"], metrics))

    def evaluate() -> None:
        if callable(box["memory"]):
            box["memory"] = box["memory"]()
        box["memory"], nats = box["eval_step"](box["state"].params, box["memory"], scored)
        jax.block_until_ready((box["memory"], nats))

    box: dict[str, Any] = {}
    config_dropout = base.get_config().model.dropout
    placed = sharding.place_segment(mesh, Segment(tokens_BT, targets_BT))
    scored = sharding.place_segment(mesh, ScoredSegment(tokens_BT, targets_BT, np.ones_like(tokens_BT, bool)))
    return {
        "check": check,
        "load": load,
        "train": _timed(train),
        "evaluate": _timed(evaluate),
        "dense": _dense_seconds,
        "memory": _peak_megabytes,
    }


def _by_path(tree: Any) -> dict[str, np.ndarray]:
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
        "memory": _peak_megabytes,
    }


def compare(case: str, rounds: int, weights: Path) -> dict[str, float]:
    """Checks that both sides compute the same, then lets them take turns."""
    sides = {name: Side(name, case, weights) for name in ("ours", "torch")}
    checked = {name: side.ask("check") for name, side in sides.items()}
    difference = _difference(checked["ours"], checked["torch"])
    print(f"{case}: losses {checked['ours']['nats']}, largest relative difference of losses and gradient norms "
          f"{difference:.1e}", flush=True)  # fmt: skip
    if not difference < TOLERANCE:
        raise SystemExit(f"{case}: the two sides do not compute the same: {checked}")
    for side in sides.values():
        side.close()

    # New processes: the check's arrays and compilations are no part of a step's peak memory.
    sides = {name: Side(name, case, weights) for name in ("ours", "torch")}
    seconds: dict[tuple[str, str], list[float]] = {}
    memory: dict[str, float] = {}
    for side in sides.values():
        side.ask("load")
    for command in ("train", "evaluate") if case == "trained" else ("train",):
        for turn in range(rounds + 1):
            for name, side in sides.items():
                taken = side.ask(command)
                if turn:  # the first compiles
                    seconds.setdefault((command, name), []).append(taken)
        if command == "train":
            memory = {name: side.ask("memory") for name, side in sides.items()}
    result = {
        "ours_seconds": median(seconds["train", "ours"]),
        "torch_seconds": median(seconds["train", "torch"]),
        "ours_megabytes": memory["ours"],
        "torch_megabytes": memory["torch"],
    }
    if case == "start":
        result["dense_share"] = sides["ours"].ask("dense") / result["ours_seconds"]
    if case == "trained":
        result["evaluation_ratio"] = median(seconds["evaluate", "torch"]) / median(seconds["evaluate", "ours"])
    for side in sides.values():
        side.close()
    return result


def _difference(ours: dict, theirs: dict) -> float:
    if ours["norms"].keys() != theirs["norms"].keys():
        raise SystemExit(f"parameters differ: {sorted(ours['norms'].keys() ^ theirs['norms'].keys())}")
    pairs = [*zip(ours["nats"], theirs["nats"], strict=True)]
    pairs += [(ours["norms"][name], theirs["norms"][name]) for name in ours["norms"]]
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--cases", default=",".join(CASES), help="which of start, trained, fixed")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.cases, arguments.weights)
        return
    tokens = STREAMS * base.get_config().train.segment
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.cases.split(","):
            results[case] = compare(case, arguments.rounds, Path(folder) / f"{case}.npz")
    print(f"\n{'case':8} {'ours':>12} {'torch':>12} {'ratio':>6} {'ours':>9} {'torch':>9} {'memory':>7}")
    for case, found in results.items():
        print(
            f"{case:8} {tokens / found['ours_seconds']:8.0f} t/s {tokens / found['torch_seconds']:8.0f} t/s "
            f"{found['torch_seconds'] / found['ours_seconds']:6.2f} {found['ours_megabytes']:6.0f} MB "
            f"{found['torch_megabytes']:6.0f} MB {found['ours_megabytes'] / found['torch_megabytes']:6.2f}x"
        )
    if "start" in results:
        print(f"start: dense matrix products alone would take {results['start']['dense_share']:.0%} of our step")
    if "trained" in results:
        print(f"trained: evaluation is {results['trained']['evaluation_ratio']:.2f} times as fast")
    if arguments.json:
        summary = {case: round(found["torch_seconds"] / found["ours_seconds"], 3) for case, found in results.items()}
        if "trained" in results:
            found = results["trained"]
            summary["trained_memory"] = round(found["ours_megabytes"] / found["torch_megabytes"], 3)
            summary["trained_evaluation"] = round(found["evaluation_ratio"], 3)
        if "start" in results:
            summary["start_dense_share"] = round(results["start"]["dense_share"], 3)
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
