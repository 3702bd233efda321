"""The training loop. Read it top to bottom and know what happens."""

import dataclasses
import math
import time
from collections import deque
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax import (
    STARTED,
    capacity,
    display,
    doctor,
    health,
    hosts,
    loss,
    model,
    peak,
    report,
    result,
    sharding,
    span,
    step,
    workdir,
)
from adaptive_span_jax import corpus as corpora
from adaptive_span_jax.bad_steps import BadSteps
from adaptive_span_jax.checkpoint import Checkpoints, Saved, versions
from adaptive_span_jax.config import Config
from adaptive_span_jax.corpus import Corpus
from adaptive_span_jax.display import counted
from adaptive_span_jax.entropy import order2_bits
from adaptive_span_jax.interrupt import Interrupt, Interrupted
from adaptive_span_jax.metrics import MetricsLog, Window
from adaptive_span_jax.optimizer import make_optimizer, make_schedule
from adaptive_span_jax.pretrained import load_pretrained
from adaptive_span_jax.score import Score, check_streams, score
from adaptive_span_jax.segments import Position, Streams
from adaptive_span_jax.train_state import TrainState, abstract_state, create_state


def train(config: Config, directory: Path, command: str) -> int:
    """Trains to the config's last step, from the newest checkpoint if there is one, and evaluates; the exit code."""
    workdir.make_workdir(directory)
    with workdir.only_user(directory):
        return _train(config, directory, command)


def _train(config: Config, directory: Path, command: str) -> int:
    hosts.on_first("data", lambda: corpora.prepare(config.data))
    corpus = corpora.load(config.data)
    doctor.same_on_all_hosts("text", corpus.fingerprint)
    mesh = sharding.make_mesh(fsdp=config.mesh.fsdp)
    sharding.check_streams(mesh, config.train.batch_size, config.train.batch_split)
    streams = Streams(corpus.train, config.train.batch_size, config.train.segment, config.seed)
    optimizer = make_optimizer(config.train)
    abstract = abstract_state(config, len(corpus.vocabulary), optimizer, mesh)
    for name, ids in (("dev", corpus.dev), ("test", corpus.test)):
        check_streams(config, ids, "exact", name)
    capacity.check_training(config, abstract, mesh)
    workdir.check_space(directory, sharding.total_bytes(abstract), config.checkpoint.keep)

    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint, hosts.Agreement(mesh))
    checkpoints.set_damaged_aside()
    newest = checkpoints.newest()
    symbols = b"".join(corpus.vocabulary).decode("latin-1")
    saved = Saved(0, Position(), 0.0, corpus.fingerprint, symbols, dataclasses.asdict(config))
    if newest is not None:
        saved = checkpoints.describe(newest)
        for change in workdir.check_same_run(directory, saved, config, corpus.fingerprint):
            display.say(f"changed since the checkpoint: {change}")
    if saved.step >= config.train.steps and (finished := result.read_result(directory, config.train.steps)):
        display.say(f"This run is complete: {directory} holds step {saved.step:,}.")
        result.show_result(directory, finished)
        return 0

    with Interrupt(hosts.Agreement(mesh)) as interrupt, checkpoints:
        if saved.step:
            checkpoints.thin_out()  # again: a process may have been killed between a save and this
            state = checkpoints.restore(saved.step, abstract)
        else:
            state = create_state(config, len(corpus.vocabulary), optimizer, mesh)
            if config.init_from:
                params = load_pretrained(config, corpus.vocabulary, abstract.params)
                state = dataclasses.replace(state, params=params)
        if hosts.is_first():
            workdir.write_config(directory, config)
        entropy = order2_bits(corpus.train)
        _show_start(config, directory, corpus, entropy, mesh, state, saved)

        train_step = step.make_train_step(config, optimizer, state, mesh)
        eval_step = step.make_eval_step(config, mesh)
        forget = step.make_forget(state)
        log = MetricsLog(directory if hosts.is_first() else None, resumed_at=saved.step)
        window, recent = Window(), deque[float](maxlen=50)
        bad_steps = BadSteps(config, saved.bad_steps)
        started, position, reached, running = time.perf_counter(), saved.position, saved.step, None

        def about(dev: Score | None = None) -> Saved:
            return dataclasses.replace(
                saved,
                step=reached,
                position=position,
                seconds=saved.seconds + time.perf_counter() - started,
                config=dataclasses.asdict(config),
                learning_rate=float(make_schedule(config.train)(reached)),
                bad_steps=bad_steps.total,
                dev_bits=dev.bits if dev else None,
                versions=versions(),
            )

        def evaluate(ids: np.ndarray, name: str) -> Score | None:
            # None: interrupted.
            with display.share_done(f"evaluating {name}") as show:

                def on_progress(share: float) -> None:
                    interrupt.check()
                    show(share)

                try:
                    return score(config, state.params, ids, "exact", eval_step, mesh, on_progress)
                except Interrupted:
                    return None

        # The same tokens every time, also at the last step: bits in the log and beside checkpoints can be compared.
        watched, part = corpus.dev[: config.evaluate.max_tokens or None], "dev"
        if watched.size < corpus.dev.size:
            part = f"the first {watched.size:,} tokens of dev"
        dev = None
        with display.TrainingProgress(saved.step, config.train.steps, config.log.every_steps) as progress:

            def settle(done: int, metrics: step.Metrics) -> None:
                # Waits for a step, counts and shows it.
                nonlocal window
                metrics = jax.device_get(metrics)
                bad_steps.count(done, bool(metrics.good))
                window.add(float(metrics.nats))
                recent.append(float(metrics.nats))
                if done == saved.step + 1:
                    startup = time.perf_counter() - STARTED
                    display.say(f"first step done {startup:.1f} s after the start of the program")
                    log.write(done, {"startup_seconds": startup})
                progress.show(done, _describe(config, corpus, window, recent, metrics))
                if done % config.log.every_steps == 0:
                    _log(config, log, done, window, metrics, mesh, bad_steps.total)
                    window = Window()

            for number in range(saved.step + 1, config.train.steps + 1):
                if interrupt.poll():
                    break
                checkpoints.check(number)
                fetching = time.perf_counter()
                segment, after = streams.take(position)
                placed = sharding.place_segment(mesh, segment)
                window.wait(time.perf_counter() - fetching)
                if position.fresh:
                    state = forget(state)
                state, metrics = train_step(state, placed)
                position, reached = after, number

                # Only now, with this step under way, is the one before waited for: devices never wait for the host.
                if running is not None:
                    settle(number - 1, running)
                running, dev = metrics, None

                evaluating = number % config.evaluate.every_steps == 0 or number == config.train.steps
                saving = checkpoints.due(number)
                if evaluating or saving:  # which waits for this step anyway; its log line belongs before both
                    settle(number, metrics)
                    running = None
                if evaluating:
                    paused = time.perf_counter()
                    dev = evaluate(watched, part)
                    window.pause(time.perf_counter() - paused)
                    if dev:
                        log.write(number, {"dev_bits": dev.bits})
                        display.say(f"step {number:,}: {dev.bits:.3f} bits per {corpus.unit} on {part}")
                        _show_health(config, log, number)
                # Not while steps or scores are non-finite: the checkpoints from before are the ones worth keeping.
                if (saving or dev) and metrics.good and (dev is None or dev.is_finite):
                    checkpoints.save(state, about(dev), log.staged)
            if running is not None:
                settle(reached, running)

        finite = not bad_steps.in_a_row and (dev is None or dev.is_finite)
        if finite:
            # Whoever sends a signal may not wait for long.
            checkpoints.save(state, about(), log.staged, check_older=interrupt.signal is None)
        checkpoints.finish()
        log.close()
        seconds = about().seconds
        if interrupt.signal:
            saved_or_not = f"saved in {directory}" if finite else f"non-finite and not saved; {checkpoints.kept}"
            display.say(f"Stopped. Step {reached:,} is {saved_or_not}; to resume: {command}")
            return interrupt.exit_code
        bad_steps.check_end(reached, checkpoints.kept)
        if dev:
            bad_steps.check_score(part, reached, dev.is_finite, checkpoints.kept)
        if dev is None or watched.size < corpus.dev.size:
            dev = evaluate(corpus.dev, "dev")
        if dev:
            bad_steps.check_score("dev", reached, dev.is_finite, checkpoints.kept)
        test = evaluate(corpus.test, "test")
        if not (dev and test):
            display.say(f"Stopped while evaluating. Training is complete and saved; to evaluate: {command}")
            return interrupt.exit_code
        bad_steps.check_score("test", reached, test.is_finite, checkpoints.kept)

    finished = result.make_result(config, corpus, dev, test, entropy, seconds)
    params = hosts.gathered(state.params)
    if hosts.is_first():
        result.write_result(directory, finished)
        report.write_report(config, directory, corpus, params, config.train.steps, dev.z_LH)
    result.show_result(directory, finished)
    return 0


def _describe(config: Config, corpus: Corpus, window: Window, recent: deque[float], metrics: step.Metrics) -> str:
    """The progress bar's text after a step."""
    z_LH = np.asarray(metrics.z_LH)
    finite = [nats for nats in recent if math.isfinite(nats)]
    bits = loss.bits(sum(finite) / len(finite)) if finite else math.nan
    tokens = config.train.batch_size * config.train.segment / window.seconds_per_step
    average = span.average_span(z_LH, config.span.ramp, config.span.limit)
    longest = span.head_spans(z_LH, config.span.ramp, config.span.limit).max()
    return (
        f"{bits:.3f} bits per {corpus.unit}  {tokens:,.0f} tokens/s  "
        f"span {average:.1f} on average, {longest:.1f} longest"
    )


def _log(
    config: Config, log: MetricsLog, number: int, window: Window, metrics: step.Metrics, mesh: Mesh, bad_steps: int
) -> None:
    z_LH = np.asarray(metrics.z_LH)
    ramp, limit = config.span.ramp, config.span.limit
    average = float(span.average_span(z_LH, ramp, limit))
    tokens = config.train.batch_size * config.train.segment / window.seconds_per_step
    scalars = {
        "train_bits": loss.bits(window.nats),
        "penalty_nats": float(metrics.penalty_nats),
        "learning_rate": float(metrics.learning_rate),
        "average_span": average,
        "longest_span": float(span.head_spans(z_LH, ramp, limit).max()),
        "bad_steps": bad_steps,
        "far_tiles": float(metrics.cost.far_tiles),
        "multiply_adds_per_token": float(metrics.cost.executed),
        "published_multiply_adds_per_token": float(metrics.cost.published),
        "tokens_per_second": tokens,
        "tokens_per_second_per_device": tokens / mesh.size,
        "flops_utilisation": peak.utilisation(config, average, tokens, list(mesh.devices.flat)),
        "input_share": window.input_share,
    }
    # After a bad step some numbers are not numbers, which JSON and histograms do not know; nor is every device's peak.
    log.write(number, {name: value for name, value in scalars.items() if math.isfinite(value)})
    if np.isfinite(z_LH).all():
        log.write_spans(number, z_LH, ramp, limit)


def _show_health(config: Config, log: MetricsLog, number: int) -> None:
    for concern in health.concerns(config, *log.read()):
        log.write_text(number, f"health/{concern.name}", health.describe(concern))
        display.say(health.describe(concern))


def _show_start(
    config: Config, directory: Path, corpus: Corpus, entropy: float, mesh: Mesh, state: TrainState, saved: Saved
) -> None:
    device = mesh.devices.flat[0]
    parts = " + ".join(f"{part.size:,}" for part in (corpus.train, corpus.dev, corpus.test))
    per_step = config.train.batch_size * config.train.segment
    display.show_block(
        "Adaptive span",
        {
            "devices": f"{mesh.size} × {device.device_kind} ({device.platform}), mesh {dict(mesh.shape)}"
            + (f", {jax.process_count()} processes" if jax.process_count() > 1 else ""),
            "model": f"{model.parameter_count(state.params):,} parameters, {counted(config.model.layers, 'layer')}, "
            f"{config.span.kind} spans of at most {counted(config.span.limit, 'position')}",
            "text": f"{corpus.name}: {parts} tokens (train + dev + test), fingerprint {corpus.fingerprint}",
            "vocabulary": f"{counted(len(corpus.vocabulary), 'symbol')}; order-2 entropy of train {entropy:.3f} bits "
            f"per {corpus.unit}",
            "training": f"{counted(config.train.steps, 'step')} of {counted(config.train.batch_size, 'stream')} × "
            f"{counted(config.train.segment, 'position')}, "
            f"{config.train.steps * per_step / corpus.train.size:.1f} epochs",
            "memory": f"{display.size(sharding.bytes_per_device(state))} of state on each device",
            "written to": f"{directory}/",
            "starting": f"from step {saved.step:,}" if saved.step else "from the beginning",
        },
    )
    for concern in health.config_concerns(config):
        display.say(health.describe(concern))
