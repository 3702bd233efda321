"""`--mode=train`: starts or resumes a run, trains, evaluates and reports. The loop is `training/loop.py`."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from adaptive_span_jax.checkpoint import workdir
from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.checkpoint.metadata import CheckpointMetadata, versions
from adaptive_span_jax.commands import doctor
from adaptive_span_jax.config import Config
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.corpus import Corpus
from adaptive_span_jax.data.entropy import order2_bits
from adaptive_span_jax.data.segments import Position, Streams
from adaptive_span_jax.model import transformer
from adaptive_span_jax.model.attention import paths
from adaptive_span_jax.report import report, result
from adaptive_span_jax.report.figures.drawing import pixels
from adaptive_span_jax.report.figures.spans import span_heat_map
from adaptive_span_jax.runtime import hosts, sharding, terminal
from adaptive_span_jax.runtime.signals import Interrupt, Interrupted
from adaptive_span_jax.runtime.terminal import counted
from adaptive_span_jax.training import capacity, diagnostics, loop, step
from adaptive_span_jax.training.evaluation import Score, check_streams, score
from adaptive_span_jax.training.goodput import Goodput
from adaptive_span_jax.training.init_from import load_init_params
from adaptive_span_jax.training.loop import Progress
from adaptive_span_jax.training.metrics import MetricsLog
from adaptive_span_jax.training.nonfinite_steps import NonFiniteSteps
from adaptive_span_jax.training.optimizer import make_optimizer, make_schedule
from adaptive_span_jax.training.recorder import Recorder
from adaptive_span_jax.training.state import TrainState, abstract_state, create_state, restore_state, to_trees

# (params, ids, the part's name for the terminal) → its score, or None after a signal.
Scorer = Callable[[transformer.Params, np.ndarray, str], Score | None]


def train(config: Config, directory: Path, command: str, program_started: float | None = None) -> int:
    """Trains to the last step, from the newest checkpoint if there is one, and evaluates; returns the exit code.

    `command` resumes the run; `program_started` is the program's start time by `time.perf_counter`.
    """
    workdir.make_workdir(directory)
    with workdir.only_user(directory):
        return _train(config, directory, command, program_started or time.perf_counter())


def _train(config: Config, directory: Path, command: str, program_started: float) -> int:
    hosts.on_process_zero("data", lambda: corpora.prepare(config.data))
    corpus = corpora.load(config.data)
    doctor.same_on_all_hosts("text", corpus.fingerprint)
    mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
    sharding.check_streams(mesh, config.train.batch_size, config.train.grad_accum_steps)
    streams = Streams(corpus.train, config.train.batch_size, config.train.segment, config.seed)
    optimizer = make_optimizer(config.train)
    abstract = abstract_state(config, len(corpus.vocabulary), optimizer, mesh)
    _check_sizes(config, directory, corpus, mesh, abstract)

    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint, hosts.ProcessMax(mesh))
    checkpoints.set_damaged_aside()
    start = newest_metadata(config, directory, corpus, checkpoints)
    if start.step >= config.train.steps and (finished := result.read_result(directory, config.train.steps)):
        terminal.say(f"This run is complete: {directory} has step {start.step:,}.")
        result.show_result(directory, finished)
        return 0

    with Interrupt(hosts.ProcessMax(mesh)) as interrupt, checkpoints:
        if start.step:
            checkpoints.thin_out()  # again: the process may have been killed after a save and before this
        state = initial_state(config, corpus, optimizer, mesh, abstract, checkpoints, start)
        if hosts.is_process_zero():
            workdir.write_config(directory, config)
        entropy = order2_bits(corpus.train)
        _show_start(config, directory, corpus, entropy, mesh, state, start)
        scorer = _make_scorer(config, mesh, interrupt)
        log = MetricsLog(directory if hosts.is_process_zero() else None, start.step, _draw_spans)
        nonfinite_steps = NonFiniteSteps(config, start.nonfinite_steps)
        goodput = Goodput(program_started, max(start.wall_seconds, log.wall_seconds), start.productive_seconds)
        metadata = functools.partial(_metadata, config, start, nonfinite_steps, goodput, time.perf_counter())
        with terminal.TrainingProgress(start.step, config.train.steps, config.log.every_steps) as bar:
            recorder = Recorder(
                config,
                corpus.unit,
                mesh,
                log,
                nonfinite_steps,
                goodput,
                _with_startup_time(bar.show, log, start, program_started),
            )
            progress = loop.train(
                config,
                Progress(start.step, state, start.position),
                streams,
                mesh,
                train_step=step.make_train_step(config, optimizer, state, mesh),
                reset_memory=step.make_reset_memory(state),
                evaluate=lambda progress: _evaluate_dev(config, corpus, scorer, log, progress),
                save=lambda progress: checkpoints.save(to_trees(progress.state), metadata(progress), log.staged),
                checkpoints=checkpoints,
                recorder=recorder,
                interrupt=interrupt,
            )

        finite = loop.is_finite(progress, recorder)
        if finite:
            # The sender of a signal may kill the process soon.
            check_older = interrupt.signal is None
            checkpoints.save(to_trees(progress.state), metadata(progress), log.staged, check_older)
        checkpoints.finish()
        mfu = [line["mfu"] for line in log.read()[0] if "mfu" in line]
        log.close()
        seconds = metadata(progress).seconds
        if interrupt.signal:
            saved_or_not = f"saved in {directory}" if finite else f"non-finite and not saved; {checkpoints.kept}"
            terminal.say(f"Stopped. Step {progress.step:,} is {saved_or_not}; to resume: {command}")
            return interrupt.exit_code
        scores = _final_scores(config, corpus, scorer, nonfinite_steps, checkpoints, progress)
        if scores is None:
            terminal.say(f"Stopped during evaluation. Training is complete and saved; to evaluate: {command}")
            return interrupt.exit_code

    finished = result.make_result(config, corpus, *scores, entropy, seconds)
    finished |= result.efficiency(goodput.share, goodput.wall_seconds, mfu)
    params = hosts.all_gather(progress.state.params)
    if hosts.is_process_zero():
        result.write_result(directory, finished)
        report.write_report(config, directory, corpus, params, config.train.steps, scores[0].z_LH)
    result.show_result(directory, finished)
    return 0


def _metadata(
    config: Config,
    start: CheckpointMetadata,
    nonfinite_steps: NonFiniteSteps,
    goodput: Goodput,
    training_started: float,
    progress: Progress,
) -> CheckpointMetadata:
    return dataclasses.replace(
        start,
        step=progress.step,
        position=progress.position,
        seconds=start.seconds + time.perf_counter() - training_started,
        config=dataclasses.asdict(config),
        learning_rate=float(make_schedule(config.train)(progress.step)),
        nonfinite_steps=nonfinite_steps.total,
        dev_bits=progress.dev.bits if progress.dev else None,
        wall_seconds=goodput.wall_seconds,
        productive_seconds=goodput.productive_seconds,
        versions=versions(),
    )


def _check_sizes(config: Config, directory: Path, corpus: Corpus, mesh: Mesh, abstract: TrainState) -> None:
    """Raises if the text is too short, or if memory or disk space is insufficient."""
    for name, ids in (("dev", corpus.dev), ("test", corpus.test)):
        check_streams(config, ids, "exact", name)
    capacity.check_training(config, abstract, mesh)
    workdir.check_space(directory, sharding.total_bytes(abstract), config.checkpoint.keep)


def _draw_spans(z_LH: np.ndarray, ramp: int, limit: int) -> np.ndarray:
    return pixels(span_heat_map(z_LH, ramp, limit))


def newest_metadata(config: Config, directory: Path, corpus: Corpus, checkpoints: Checkpoints) -> CheckpointMetadata:
    """The metadata of the newest checkpoint, or that of step 0; raises if the checkpoint is of another run."""
    newest = checkpoints.newest()
    if newest is None:
        symbols = corpora.vocabulary_text(corpus.vocabulary)
        return CheckpointMetadata(0, Position(), 0.0, corpus.fingerprint, symbols, dataclasses.asdict(config))
    metadata = checkpoints.describe(newest)
    for change in workdir.check_same_run(directory, metadata, config, corpus.fingerprint):
        terminal.say(f"changed since the last checkpoint: {change}")
    return metadata


def initial_state(
    config: Config,
    corpus: Corpus,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    abstract: TrainState,
    checkpoints: Checkpoints,
    start: CheckpointMetadata,
) -> TrainState:
    """The state that training starts from: a checkpoint's, another run's weights, or random weights."""
    if start.step:
        return restore_state(checkpoints, start.step, abstract)
    state = create_state(config, len(corpus.vocabulary), optimizer, mesh)
    if not config.init_from:
        return state
    return dataclasses.replace(state, params=load_init_params(config, corpus.vocabulary, abstract.params))


def _make_scorer(config: Config, mesh: Mesh, interrupt: Interrupt) -> Scorer:
    eval_step = step.make_eval_step(config, mesh)

    def scorer(params: transformer.Params, ids: np.ndarray, name: str) -> Score | None:
        with terminal.share_done(f"evaluating {name}") as show:

            def on_progress(share: float) -> None:
                interrupt.check()
                show(share)

            try:
                return score(config, params, ids, "exact", eval_step, mesh, on_progress)
            except Interrupted:
                return None

    return scorer


def _with_startup_time(
    show: Callable[[int, str], None], log: MetricsLog, start: CheckpointMetadata, program_started: float
) -> Callable[[int, str], None]:
    """`show`, which after the first step also reports the start-up time."""

    def show_step(number: int, text: str) -> None:
        if number == start.step + 1:
            startup = time.perf_counter() - program_started
            terminal.say(f"first step finished {startup:.1f} s after program start")
            log.write(number, {"startup_seconds": startup})
        show(number, text)

    return show_step


def _dev_part(config: Config, corpus: Corpus) -> tuple[np.ndarray, str]:
    """The part of dev that evaluations during training score, always the same so that bits are comparable; its name."""
    ids = corpus.dev[: config.evaluate.max_tokens or None]
    return ids, "dev" if ids.size == corpus.dev.size else f"the first {ids.size:,} tokens of dev"


def _evaluate_dev(config: Config, corpus: Corpus, scorer: Scorer, log: MetricsLog, progress: Progress) -> Score | None:
    ids, part = _dev_part(config, corpus)
    dev = scorer(progress.state.params, ids, part)
    if dev:
        log.write(progress.step, {"dev_bits": dev.bits})
        terminal.say(f"step {progress.step:,}: {dev.bits:.3f} bits per {corpus.unit} on {part}")
        for concern in diagnostics.concerns(config, *log.read()):
            log.write_text(progress.step, f"health/{concern.name}", diagnostics.describe(concern))
            terminal.say(diagnostics.describe(concern))
    return dev


def _final_scores(
    config: Config,
    corpus: Corpus,
    scorer: Scorer,
    nonfinite_steps: NonFiniteSteps,
    checkpoints: Checkpoints,
    progress: Progress,
) -> tuple[Score, Score] | None:
    """The scores of all of dev and test; None after a signal. Raises if the last step or a score is non-finite."""
    nonfinite_steps.check_end(progress.step, checkpoints.kept)
    ids, part = _dev_part(config, corpus)
    dev, params = progress.dev, progress.state.params
    if dev:
        nonfinite_steps.check_score(part, progress.step, dev.is_finite, checkpoints.kept)
    if dev is None or ids.size < corpus.dev.size:
        dev = scorer(params, corpus.dev, "dev")
    if dev:
        nonfinite_steps.check_score("dev", progress.step, dev.is_finite, checkpoints.kept)
    test = scorer(params, corpus.test, "test")
    if not (dev and test):
        return None
    nonfinite_steps.check_score("test", progress.step, test.is_finite, checkpoints.kept)
    return dev, test


def _show_start(
    config: Config,
    directory: Path,
    corpus: Corpus,
    entropy: float,
    mesh: Mesh,
    state: TrainState,
    start: CheckpointMetadata,
) -> None:
    device = mesh.devices.flat[0]
    parts = " + ".join(f"{part.size:,}" for part in (corpus.train, corpus.dev, corpus.test))
    per_step = config.train.batch_size * config.train.segment
    terminal.show_block(
        "Adaptive span",
        {
            "devices": f"{mesh.size} × {device.device_kind} ({device.platform}), mesh {dict(mesh.shape)}"
            + (f", {jax.process_count()} processes" if jax.process_count() > 1 else ""),
            "model": f"{transformer.parameter_count(state.params):,} parameters, "
            f"{counted(config.model.layers, 'layer')}, {config.span.kind} spans of at most "
            f"{counted(config.span.limit, 'position')}"
            + (
                f", {counted(config.model.persistent, 'persistent vector')} per head" if config.model.persistent else ""
            ),
            "attention": paths.describe(paths.choose_for(config, device.platform)),
            "text": f"{corpus.name}: {parts} tokens (train + dev + test), fingerprint {corpus.fingerprint}",
            "vocabulary": f"{counted(len(corpus.vocabulary), 'symbol')}; order-2 entropy of train {entropy:.3f} bits "
            f"per {corpus.unit}",
            "training": f"{counted(config.train.steps, 'step')} of {counted(config.train.batch_size, 'stream')} × "
            f"{counted(config.train.segment, 'position')}, "
            f"{config.train.steps * per_step / corpus.train.size:.1f} epochs",
            "memory": f"{terminal.size(sharding.bytes_per_device(state))} of state per device",
            "written to": f"{directory}/",
            "starting": f"from step {start.step:,}" if start.step else "from the beginning",
        },
    )
    for concern in diagnostics.config_concerns(config):
        terminal.say(diagnostics.describe(concern))
