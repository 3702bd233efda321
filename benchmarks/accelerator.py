"""Measures real training steps on the accelerators of this machine, and compares them with the committed plan.

    python -m benchmarks.accelerator [--output=accelerator.json] [--seconds=20] [--tiny]

For the small and the large published model: the train step in bfloat16 with 8 streams a device on all devices of this
host, with spans as at the start, as in the made-up trained profile, and with every head at 2048. Text is random. About
a minute a case, most of it for compilation. The file is written anew after every case; a case that fails, because there
is not enough memory for example, is reported in it and the next one starts. `--tiny` is for trying it out on a CPU.
"""

import argparse
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

import adaptive_span_jax
from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import Segment
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import flops
from adaptive_span_jax.model.attention import paths
from adaptive_span_jax.model.attention.fused.sizes import walk
from adaptive_span_jax.model.attention.inputs import FarShape
from adaptive_span_jax.planning import fit
from adaptive_span_jax.planning.spans import LONG, START, TRAINED, spans
from adaptive_span_jax.runtime import sharding, storage, strict_json, terminal
from adaptive_span_jax.training import step
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import TrainState, create_state
from benchmarks import plan_tables
from benchmarks.tpu_cycles import read_config

ROOT = Path(__file__).parents[1]
MODELS = ("enwik8", "enwik8_large")
SPANS = (START, TRAINED, LONG)
STREAMS_A_DEVICE = 8  # as in the plans: 64 streams on 8 chips
VOCABULARY = 205
WARM_UP_STEPS = 3
ROUNDS = 10  # in each of which the devices are waited for once, as training does not wait for them after every step

TINY = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "model.feedforward": 64,
    "span.limit": 256,
    "train.segment": 128,
}

# The machine of docs/plan_tables.csv with the same chip, by how JAX calls it; the first that matches.
PLANNED = {
    "TPU v5 lite": "v5e:2x4",
    "TPU v5e": "v5e:2x4",
    "TPU v6": "v6e:2x4",
    "TPU v5": "v5p:2x2x2",
    "NVIDIA A100": "a100:8",
    "NVIDIA H100": "h100:8",
}
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin")
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION")

_FAILURES = (jax.errors.JaxRuntimeError, UserError, MemoryError)

Case = dict[str, Any]


class Model:
    """A model on the devices of this host, compiled once for all settings of its spans."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self._mesh = config, mesh
        self._optimizer = make_optimizer(config.train)
        self._kept: TrainState | None = self._new_state()  # of the setting before; a step that fails has consumed it
        jitted: Any = step.make_train_step(config, self._optimizer, self._kept, mesh)
        started = time.perf_counter()
        with fit.no_compilation_cache():
            self._step = jitted.lower(self._kept, self._segment(0)).compile()
        self.compile_seconds = time.perf_counter() - started
        self.compiled_bytes = fit.program_bytes(self._step)

    def measure(self, setting: str, seconds: float, show: Callable[[float], None]) -> Case:
        """Times steps at a setting of the spans for about so many seconds."""
        state, metrics = self._take_state(setting), None
        segments = [self._segment(number) for number in range(2)]

        def run(steps: int) -> float:
            nonlocal state, metrics
            started = time.perf_counter()
            for number in range(steps):
                state, metrics = self._step(state, segments[number % len(segments)])
            jax.block_until_ready((state, metrics))
            return (time.perf_counter() - started) / steps

        run(WARM_UP_STEPS)
        steps = max(math.ceil(seconds / ROUNDS / run(1)), 1)
        found = []
        for number in range(ROUNDS):
            found.append(1e3 * run(steps))
            show((number + 1) / ROUNDS)
        assert metrics is not None
        self._kept = state
        tokens = self.config.train.batch_size * self.config.train.segment
        return {
            "ms": statistics.median(found),
            "fastest_ms": min(found),
            "slowest_ms": max(found),
            "steps": steps * ROUNDS,
            "tokens_per_second": 1e3 * tokens / statistics.median(found),
            "nats": float(metrics.nats),
            "far_tiles_a_stream": int(metrics.cost.far_tiles),
            "multiply_adds_a_token_forward": float(metrics.cost.executed),
            "turns": turns(self.config, spans(self.config, setting), sharding.platform_of(self._mesh)),
            "peak_bytes_so_far": peak_bytes(),
        }

    def _new_state(self) -> TrainState:
        return create_state(self.config, VOCABULARY, self._optimizer, self._mesh)

    def _take_state(self, setting: str) -> TrainState:
        """A state with the spans of a setting."""
        state, self._kept = self._kept or self._new_state(), None
        span = state.params["layers"]["attention"]["span"]
        old, limit = span["span_fraction_H"], self.config.span.limit
        span["span_fraction_H"] = jax.device_put((spans(self.config, setting) / limit).astype(old.dtype), old.sharding)
        return state

    def _segment(self, number: int) -> Segment:
        shape = (self.config.train.batch_size, self.config.train.segment + 1)
        ids_BX = np.random.default_rng(number).integers(0, VOCABULARY, shape, np.int32)
        return sharding.place_segment(self._mesh, Segment(ids_BX[:, :-1].copy(), ids_BX[:, 1:].copy()))


def turns(config: Config, z_LH: np.ndarray, kind: str) -> int:
    """Turns of the far loops in a step, forward and backward; in the fused kernels those of one stream."""
    if paths.choose_for(config, kind).name == "fused":
        steps_LH, full_LH = walk(z_LH, z_LH, config.span.ramp, config.span.limit)
        return 2 * int(np.where(full_LH < 0, 0, steps_LH).sum())
    shape = FarShape.on(kind)
    tiles_LHX = np.asarray(flops.far_tiles(config, jax.numpy.asarray(z_LH, jax.numpy.float32), shape)[1])
    # Heads that are read together read a block in one turn, and the first of them reads every block.
    tiles_LHX = tiles_LHX[:, :: shape.groups(config.model.heads)[0]]
    in_blocks = 0 if shape.one_query_block(config.train.segment) else tiles_LHX.sum()
    return 2 * int((tiles_LHX > 0).sum() + in_blocks)


def peak_bytes() -> int | None:
    """The most memory that any device of this process has used so far, if the platform says."""
    found = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((count for count in found if count is not None), default=None)


def planned(model: str, setting: str, device_kind: str) -> dict[str, str] | None:
    """The committed plan's row for the same chip, if there is one."""
    topology = next((found for kind, found in PLANNED.items() if device_kind.startswith(kind)), None)
    wanted = (model, topology, setting)
    rows = (row for row in plan_tables.read() if (row["config"], row["topology"], row["spans"]) == wanted)
    return next(rows, None)


def environment() -> dict[str, Any]:
    """Versions, devices and host; nothing that names the machine or its user."""
    devices = jax.local_devices()
    return {
        "adaptive_span_jax": adaptive_span_jax.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform_version": devices[0].client.platform_version,
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "bytes_limit": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "host": {"system": platform.platform(), "cores": os.cpu_count()},
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=ROOT, capture_output=True, text=True
        )
    except OSError:
        return None
    return found.stdout.strip() or None


def read_model(name: str, tiny: bool) -> Config:
    """The config of a model for the devices of this host."""
    config = read_config(name).changed(TINY if tiny else {})
    return config.changed({"train.batch_size": STREAMS_A_DEVICE * jax.local_device_count()})


def run(output: Path, seconds: float, tiny: bool) -> list[Case]:
    """Measures all cases; the file always has those that are done."""
    mesh = sharding.make_mesh(jax.local_devices())
    report: dict[str, Any] = {**environment(), "tiny": tiny, "cases": []}
    for name in MODELS:
        model: Model | str
        try:
            with terminal.waiting(f"compiling {name}"):
                model = Model(read_model(name, tiny), mesh)
        except _FAILURES as error:
            model = _reason(error)
        for setting in SPANS:
            case: Case = {"config": name, "spans": setting}
            report["cases"].append(case)
            if isinstance(model, str):
                case["error"] = model
            else:
                case |= {"compile_seconds": model.compile_seconds, "compiled_bytes": model.compiled_bytes}
                case |= {"streams": model.config.train.batch_size}
                try:
                    with terminal.share_done(f"{name}, {setting}") as show:
                        case |= model.measure(setting, seconds, show)
                except _FAILURES as error:
                    case["error"] = _reason(error)
            plan = None if tiny else planned(name, setting, report["device_kind"])
            if plan is not None:
                case["planned"] = plan
            if plan is not None and "ms" in case:
                case["times_the_plan"] = case["ms"] / float(plan["ms"])
            if "error" in case:
                terminal.say(f"{name}, {setting}: {case['error']}")
            storage.write_text(output, strict_json.dumps(report, indent=1))
        del model  # its state, before the next one has to fit
    return report["cases"]


def _reason(error: Exception) -> str:
    """Why a case failed, in one line."""
    text = str(error)
    first = text.strip().splitlines()[0][:500] if text.strip() else type(error).__name__
    return f"not enough memory: {first}" if "RESOURCE_EXHAUSTED" in text else first


def show(cases: list[Case], output: Path) -> None:
    """Prints the cases as a table, and where to send the file."""
    rows = []
    for case in cases:
        peak, plan = case.get("peak_bytes_so_far"), case.get("planned")
        measured = (
            [f"{case['ms']:,.1f}", f"{case['fastest_ms']:,.1f} to {case['slowest_ms']:,.1f}"]
            if "ms" in case
            else ["failed", ""]
        )
        pace = f"{case['tokens_per_second']:,.0f}" if "ms" in case else ""
        memory = terminal.size(peak) if peak else ""
        ratio = f"{case['times_the_plan']:.2f}" if "times_the_plan" in case else ""
        compared = [f"{float(plan['ms']):,.1f}" if plan else "", ratio]
        rows.append([f"{case['config']}, {case['spans']}", *measured, pace, memory, *compared])
    headings = ["ms a step", "from, to", "tokens/s", "peak so far", "planned ms", "times the plan"]
    terminal.show_table(["case", *headings], rows)
    terminal.say(f"Written to {output}. Please open an issue in this project's repository and attach the file.")


def main(arguments: list[str] | None = None) -> int:
    """The command line; exit code 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("accelerator.json"), help="the file to write")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timed steps in each case")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try it out on a CPU")
    parsed = parser.parse_args(arguments)
    device = jax.local_devices()[0]
    if device.platform == "cpu" and not parsed.tiny:
        parser.error("JAX found no accelerator, only a CPU; --tiny tries out the program with tiny models")
    terminal.say(f"{jax.local_device_count()} × {device.device_kind}")
    cases = run(parsed.output, parsed.seconds, parsed.tiny)
    show(cases, parsed.output)
    return int(any("error" in case for case in cases))


if __name__ == "__main__":
    sys.exit(main())
