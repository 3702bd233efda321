"""`--mode=profile`: traces a few training steps and lists the operations that took longest.

The run's checkpoints and logs are only read: everything is written to WORKDIR/profile.
"""

import contextlib
import csv
import io
import shlex
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.commands import doctor, train
from adaptive_span_jax.config import Config
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.segments import Streams
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import hosts, sharding, storage, terminal, trace
from adaptive_span_jax.runtime.trace import Operation
from adaptive_span_jax.training import capacity, step
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import abstract_state

WARM_UP_STEPS = 2  # before the trace: the first ones allocate memory and compile what is not compiled yet
STEPS = 5  # in the trace
_SHOWN = 15  # operations, of all that are in the file


def profile(config: Config, directory: Path) -> int:
    """Trains a few steps from the newest checkpoint, or from the beginning, and writes what they took."""
    workdir.make_workdir(directory)
    hosts.on_process_zero("data", lambda: corpora.prepare(config.data))
    corpus = corpora.load(config.data)
    doctor.same_on_all_hosts("text", corpus.fingerprint)
    mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
    sharding.check_streams(mesh, config.train.batch_size, config.train.grad_accum_steps)
    streams = Streams(corpus.train, config.train.batch_size, config.train.segment, config.seed)
    optimizer = make_optimizer(config.train)
    abstract = abstract_state(config, len(corpus.vocabulary), optimizer, mesh)
    capacity.check_training(config, abstract, mesh)
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint)
    start = train.newest_metadata(config, directory, corpus, checkpoints)
    state = train.initial_state(config, corpus, optimizer, mesh, abstract, checkpoints, start)

    position, reset_memory = start.position, step.make_reset_memory(state)
    jitted: Any = step.make_train_step(config, optimizer, state, mesh)
    with terminal.waiting("compiling the train step"):
        placed = sharding.place_segment(mesh, streams.take(position)[0])
        train_step = jitted.lower(state, placed).compile()

    def run(number: int) -> None:
        nonlocal state, position
        with jax.profiler.StepTraceAnnotation("train", step_num=start.step + number):
            state = reset_memory(state) if position.fresh else state
            segment, position = streams.take(position)
            state, _ = train_step(state, sharding.place_segment(mesh, segment))

    output = storage.Staged(directory / "profile", ())
    # Processes on one host would write the same file, so only process 0 traces its devices.
    recording = trace.recording(output.folder) if hosts.is_process_zero() else contextlib.nullcontext("")
    with terminal.share_done(f"training {WARM_UP_STEPS} steps, then {STEPS} under the profiler") as show:
        for number in range(1, WARM_UP_STEPS + 1):
            run(number)
            show(number / (WARM_UP_STEPS + STEPS))
        jax.block_until_ready(state)
        with recording as session:
            began = time.perf_counter()
            for number in range(WARM_UP_STEPS + 1, WARM_UP_STEPS + STEPS + 1):
                run(number)
                show(number / (WARM_UP_STEPS + STEPS))
            jax.block_until_ready(state)
            seconds = (time.perf_counter() - began) / STEPS

    def write() -> None:
        with terminal.waiting("reading the trace"):
            operations = trace.read_operations(output.folder, session)
            sources = trace.sources(train_step.as_text())
        if operations:
            storage.write_text(output.folder / "operations.csv", _table(operations, sources))
        output.close()
        _show_steps(config, directory, mesh, start.step, seconds, session)
        if not operations:
            raise UserError(f"JAX {jax.__version__} recorded no operations in {directory / 'profile'}")
        _show_operations(operations, sources)

    hosts.on_process_zero("profile", write)
    return 0


def _show_steps(config: Config, directory: Path, mesh: Mesh, first: int, seconds: float, session: str) -> None:
    tokens = config.train.batch_size * config.train.segment / seconds
    several = f", of which the {jax.local_device_count()} of process 0 are traced" if jax.process_count() > 1 else ""
    terminal.show_block(
        f"Profile of {STEPS} steps after step {first + WARM_UP_STEPS:,}",
        {
            "devices": f"{mesh.size} × {mesh.devices.flat[0].device_kind}{several}",
            "a step": f"{seconds * 1e3:,.1f} ms while profiled, {tokens:,.0f} tokens/s",
            "trace": f"{directory / 'profile'}, session {session}; to open it: pip install xprof && xprof "
            f"--logdir={shlex.quote(str(directory / 'profile'))}",
            "all operations": f"{directory / 'profile' / 'operations.csv'}",
        },
    )


def _table(operations: list[Operation], sources: trace.Sources) -> str:
    text, whole = io.StringIO(), sum(operation.seconds for operation in operations)
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["operation", "count", "total_ms", "share", "source"])
    for name, count, seconds in operations:
        rows.writerow([name, count, f"{seconds * 1e3:.6f}", f"{seconds / whole:.6f}", sources.get(name, "")])
    return text.getvalue()


def _show_operations(operations: list[Operation], sources: trace.Sources) -> None:
    shown, whole = operations[:_SHOWN], sum(operation.seconds for operation in operations)
    last = [trace.shortened(sources.get(operation.name, "")) for operation in shown]
    width = max(map(len, last))
    rows = [
        [name, f"{count:,}", f"{seconds * 1e3:,.1f} ms", f"{100 * seconds / whole:.1f} %", source.ljust(width)]
        for (name, count, seconds), source in zip(shown, last, strict=True)
    ]
    terminal.show_table(["operation", "count", "total", "share", "source".ljust(width)], rows)
    terminal.say(
        "Totals are over all steps and devices, without the time of operations inside (the body of a loop); "
        f"{len(operations) - len(shown):,} more operations take "
        f"{100 * sum(operation.seconds for operation in operations[_SHOWN:]) / whole:.1f} %."
    )
