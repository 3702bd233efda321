"""Whether a run fits a machine that is not here: the real train step, compiled for it."""

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import Segment
from adaptive_span_jax.planning.topology import GIB, Machine
from adaptive_span_jax.runtime import sharding, terminal
from adaptive_span_jax.training import step
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import TrainState, abstract_state

# Symbols and training tokens of the corpora whose text is always the same; others have at most 256 symbols.
CORPORA = {"enwik8": (205, 90_000_000), "text8": (28, 90_000_000)}
_ANY_BYTES = 256

# What may make a run fit: first what leaves its numbers as they are, the likeliest first.
_REMEDIES: tuple[dict[str, Any], ...] = (
    {"model.remat": True},
    {"train.grad_accum_steps": 2},
    {"train.grad_accum_steps": 4},
    {"model.remat": True, "train.grad_accum_steps": 4},
    {"model.compute_dtype": "bfloat16"},
    {"model.compute_dtype": "bfloat16", "model.remat": True, "train.grad_accum_steps": 4},
)


@dataclasses.dataclass(frozen=True)
class Fit:
    """What the compiled step takes of one chip's memory, in bytes, and the program."""

    parameters: int
    optimizer: int
    memory: int
    total: int
    usable: int
    compile_seconds: float
    processor_seconds: float  # of all cores together, which does not depend on what else runs
    program: str = ""  # optimized HLO; empty if the compiler gave up because the chip's memory is too small

    @property
    def fits(self) -> bool:
        """Whether the chip has that much."""
        return self.total <= self.usable

    @property
    def temporaries(self) -> int:
        """Activations, gradients and everything else the step makes for itself."""
        return self.total - self.parameters - self.optimizer - self.memory


def suggest(config: Config, machine: Machine, devices: list[jax.Device]) -> str:
    """Compiles with one remedy after the other and names the first that makes the run fit."""
    tried = []
    for remedy in _REMEDIES:
        changed = config.changed(remedy)
        if changed == config or config.train.batch_size % (len(devices) * changed.train.grad_accum_steps):
            continue
        flags = " ".join(f"--config.{field}={value}" for field, value in remedy.items())
        terminal.say(f"trying {flags}")
        found = compile_for(changed, machine, devices)
        if found.fits:
            return f"The smallest change that fits: {flags}, which takes {terminal.size(found.total)} of one chip."
        tried.append(f"{flags} ({terminal.size(found.total)})")
    return f"It would not fit with {', nor with '.join(tried) or 'any change known here'} either: use more chips."


def compile_for(config: Config, machine: Machine, devices: list[jax.Device]) -> Fit:
    """Compiles the train step that training runs, from shapes and shardings alone."""
    mesh = sharding.make_mesh(devices, config.mesh.fsdp)
    sharding.check_streams(mesh, config.train.batch_size, config.train.grad_accum_steps)
    state, _ = abstract(config, mesh)
    with terminal.waiting(f"compiling for {machine.topology}"), no_compilation_cache():
        started, worked = time.perf_counter(), time.process_time()
        total, program = _compile(lower(config, mesh))
    return Fit(
        parameters=sharding.bytes_per_device(state.params),
        optimizer=sharding.bytes_per_device(state.opt_state),
        memory=sharding.bytes_per_device(state.memory),
        total=total,
        usable=machine.chip.usable_bytes,
        compile_seconds=time.perf_counter() - started,
        processor_seconds=time.process_time() - worked,
        program=program,
    )


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Within it everything is compiled: the plan says how long that takes, and without devices nothing loads."""
    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)


def abstract(config: Config, mesh: Mesh) -> tuple[TrainState, Segment]:
    """Shapes and shardings of what the train step takes, for any text of the config's source."""
    vocabulary, _ = CORPORA.get(config.data.source, (_ANY_BYTES, None))
    shape, at = (config.train.batch_size, config.train.segment), sharding.by_stream(mesh, config.train.batch_size)
    tokens_BT: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=at)
    return abstract_state(config, vocabulary, make_optimizer(config.train), mesh), Segment(tokens_BT, tokens_BT)


def lower(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """The train step, ready to be compiled for the mesh's devices."""
    state, segment = abstract(config, mesh)
    train_step: Any = step.make_train_step(config, make_optimizer(config.train), state, mesh)
    return train_step.lower(state, segment)


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """What a program takes of one chip's memory: arguments, temporaries, and results that reuse no argument."""
    found: Any = compiled.memory_analysis()
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return kept + found.temp_size_in_bytes


def _compile(lowered: jax.stages.Lowered) -> tuple[int, str]:
    """(the program's bytes of one chip's memory, its text)."""
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        # The TPU compiler gives up on what does not fit, and says what it would have taken.
        needed = re.search(r"\(([\d.]+)([MG])\) exceeds available", str(error))
        if needed is None:
            raise
        return int(float(needed[1]) * {"M": 2**20, "G": GIB}[needed[2]]), ""
    return program_bytes(compiled), compiled.as_text() or ""
