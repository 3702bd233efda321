"""Whether a run fits a machine that is not here, and about how long it takes: the real train step, compiled for it."""

import dataclasses
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from adaptive_span_jax import display, roofline, sharding, step
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.machine import GIB, Machine
from adaptive_span_jax.optimizer import make_optimizer
from adaptive_span_jax.segments import Segment
from adaptive_span_jax.train_state import TrainState, abstract_state

# Symbols and training tokens of the corpora whose text is always the same; others have at most 256 symbols.
_CORPORA = {"enwik8": (205, 90_000_000), "text8": (28, 90_000_000)}
_ANY_BYTES = 256

# What may make a run fit: first what leaves its numbers as they are, the likeliest first.
_REMEDIES: tuple[dict[str, Any], ...] = (
    {"model.remat": True},
    {"train.batch_split": 2},
    {"train.batch_split": 4},
    {"model.remat": True, "train.batch_split": 4},
    {"model.compute_dtype": "bfloat16"},
    {"model.compute_dtype": "bfloat16", "model.remat": True, "train.batch_split": 4},
)


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the compiled step takes of one chip's memory, in bytes."""

    parameters: int
    optimizer: int
    memory: int
    total: int
    usable: int
    compile_seconds: float
    processor_seconds: float  # of all cores together, which does not depend on what else runs

    @property
    def fits(self) -> bool:
        """Whether the chip has that much."""
        return self.total <= self.usable

    @property
    def temporaries(self) -> int:
        """Activations, gradients and everything else the step makes for itself."""
        return self.total - self.parameters - self.optimizer - self.memory


def plan(config: Config, topology: str, name: str) -> int:
    """Compiles the train step for a machine and prints what it takes; exit code 0 if it fits, else 1."""
    machine = Machine.parse(topology)
    if config.model.attention != "per_head" or config.model.compute_dtype == "float64":
        raise UserError("--mode=plan is for config.model.attention=per_head in float32 or bfloat16")
    devices = machine.devices()
    fit = compile_for(config, machine, devices)
    display.show_block(f"{name} on {topology}: {len(devices)} × {machine.chip.name}", _describe(config, fit))
    if not fit.fits:
        display.say(suggest(config, machine, devices))
    _show_estimates(config, machine, len(devices), fit)
    return 0 if fit.fits else 1


def suggest(config: Config, machine: Machine, devices: list[jax.Device]) -> str:
    """Compiles with one remedy after the other and names the first that makes the run fit."""
    tried = []
    for remedy in _REMEDIES:
        changed = config.changed(remedy)
        if changed == config or config.train.batch_size % (len(devices) * changed.train.batch_split):
            continue
        flags = " ".join(f"--config.{field}={value}" for field, value in remedy.items())
        display.say(f"trying {flags}")
        found = compile_for(changed, machine, devices)
        if found.fits:
            return f"The smallest change that fits: {flags}, which takes {display.size(found.total)} of one chip."
        tried.append(f"{flags} ({display.size(found.total)})")
    return f"It would not fit with {', nor with '.join(tried) or 'any change known here'} either: use more chips."


def compile_for(config: Config, machine: Machine, devices: list[jax.Device]) -> Fit:
    """Compiles the train step that `train.py` runs, from shapes and shardings alone."""
    mesh = sharding.make_mesh(devices, config.mesh.fsdp)
    sharding.check_streams(mesh, config.train.batch_size, config.train.batch_split)
    state, _ = abstract(config, mesh)
    jax.config.update("jax_enable_compilation_cache", False)  # its time is to be known
    started, worked = time.perf_counter(), time.process_time()
    with display.waiting(f"compiling for {machine.topology}"):
        total = _total_bytes(lower(config, mesh))
    return Fit(
        parameters=sharding.bytes_per_device(state.params),
        optimizer=sharding.bytes_per_device(state.opt_state),
        memory=sharding.bytes_per_device(state.memory),
        total=total,
        usable=machine.chip.usable_bytes,
        compile_seconds=time.perf_counter() - started,
        processor_seconds=time.process_time() - worked,
    )


def abstract(config: Config, mesh: Mesh) -> tuple[TrainState, Segment]:
    """Shapes and shardings of what the train step takes, for any text of the config's source."""
    vocabulary, _ = _CORPORA.get(config.data.source, (_ANY_BYTES, None))
    shape, at = (config.train.batch_size, config.train.segment), sharding.by_stream(mesh, config.train.batch_size)
    tokens_BT: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=at)
    return abstract_state(config, vocabulary, make_optimizer(config.train), mesh), Segment(tokens_BT, tokens_BT)


def lower(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """The train step, ready to be compiled for the mesh's devices."""
    state, segment = abstract(config, mesh)
    train_step: Any = step.make_train_step(config, make_optimizer(config.train), state, mesh)
    return train_step.lower(state, segment)


def _total_bytes(lowered: jax.stages.Lowered) -> int:
    """What the program takes of one chip's memory: arguments, temporaries, and results that reuse no argument."""
    try:
        found: Any = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        # The TPU compiler gives up on what does not fit, and says what it would have taken.
        needed = re.search(r"\(([\d.]+)([MG])\) exceeds available", str(error))
        if needed is None:
            raise
        return int(float(needed[1]) * {"M": 2**20, "G": GIB}[needed[2]])
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return kept + found.temp_size_in_bytes


def _describe(config: Config, fit: Fit) -> dict[str, str]:
    share = f"{display.size(fit.total)} of the {display.size(fit.usable)} that a program can use of one chip"
    return {
        "fits": f"{'yes' if fit.fits else 'NO'}: {share}",
        "parameters": display.size(fit.parameters),
        "optimizer": display.size(fit.optimizer),
        "memory": f"{display.size(fit.memory)} of segment memory",
        "temporaries": f"{display.size(fit.temporaries)} for activations, gradients and working space",
        "compiled": f"in {display.duration(fit.compile_seconds)} for {config.model.compute_dtype}, with "
        f"{display.duration(fit.processor_seconds)} of processor time",
    }


def _show_estimates(config: Config, machine: Machine, chips: int, fit: Fit) -> None:
    per_step = config.train.batch_size * config.train.segment
    _, text = _CORPORA.get(config.data.source, (None, None))
    epochs = f", {config.train.steps * per_step / text:.1f} epochs" if text else ""
    display.say(f"Estimates, not measurements, for {display.counted(config.train.steps, 'step')}{epochs}:")
    rows = []
    for setting, z_LH in roofline.span_settings(config).items():
        found = roofline.estimate(config, z_LH, machine.chip, chips, fit.parameters, fit.temporaries)
        rows.append(
            [
                setting,
                f"{found.multiply_adds / 1e12:.2f} T",
                f"{found.turns:,}",
                f"{found.seconds * 1e3:,.1f} ms",
                f"{found.tokens_per_second(config):,.0f}",
                f"{found.seconds * config.train.steps / 3600:.1f} h",
            ]
        )
    display.show_table(["spans", "multiply-adds", "loop turns", "a step", "tokens/s", "to the end"], rows)
    display.say(
        f"at {roofline.ARITHMETIC_SHARE:.0%} of the chip's peak arithmetic or {roofline.BANDWIDTH_SHARE:.0%} of its "
        f"bandwidth, whichever is slower, and {roofline.TURN_SECONDS[machine.chip.platform] * 1e6:.0f} µs a loop turn "
        "(assumed); without communication, evaluation and checkpoints. The trained profile is a made-up one."
    )
