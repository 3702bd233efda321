"""The training loop: one function over explicit values.

    segment → train_step → metrics, fetched one step later → log
                        └→ at intervals: dev evaluation, checkpoint

Set-up, resuming, the final evaluation and the report are in `commands/train.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import Position, Streams
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.runtime.signals import Interrupt
from adaptive_span_jax.training.evaluation import Score
from adaptive_span_jax.training.recorder import Recorder
from adaptive_span_jax.training.state import TrainState
from adaptive_span_jax.training.step import TrainStep


class Progress(NamedTuple):
    """The state of a run between two steps."""

    step: int
    state: TrainState
    position: Position  # in the text, of the next segment
    dev: Score | None = None  # if dev was evaluated after this step


def train(
    config: Config,
    progress: Progress,
    streams: Streams,
    mesh: Mesh,
    *,
    train_step: TrainStep,
    reset_memory: Callable[[TrainState], TrainState],
    evaluate: Callable[[Progress], Score | None],
    save: Callable[[Progress], None],
    checkpoints: Checkpoints,
    recorder: Recorder,
    interrupt: Interrupt,
) -> Progress:
    """Trains to the config's last step, or until a signal; the state in `progress` is donated."""
    running = None  # the metrics of the step in progress
    for number in range(progress.step + 1, config.train.steps + 1):
        if interrupt.poll():
            break
        with recorder.saving():
            checkpoints.wait_if_overdue(number)
        with recorder.fetching():
            segment, position = streams.take(progress.position)
            placed = sharding.place_segment(mesh, segment)
        state = reset_memory(progress.state) if progress.position.fresh else progress.state
        state, metrics = train_step(state, placed)
        progress = Progress(number, state, position)

        # Wait for the previous step only after dispatching this one, so that devices never wait for the host.
        if running is not None:
            recorder.finalize_step(number - 1, running)
        running = metrics

        evaluating = number % config.evaluate.every_steps == 0 or number == config.train.steps
        saving = checkpoints.due(number)
        if evaluating or saving:  # both wait for this step anyway, and its log line comes first
            recorder.finalize_step(number, metrics)
            running = None
        if evaluating:
            with recorder.paused():
                progress = progress._replace(dev=evaluate(progress))
        # Not while steps or scores are non-finite: the checkpoints from before are the ones worth keeping.
        if (saving or progress.dev) and is_finite(progress, recorder):
            with recorder.saving():
                save(progress)
    if running is not None:
        recorder.finalize_step(progress.step, running)
    return progress


def is_finite(progress: Progress, recorder: Recorder) -> bool:
    """Whether the last step, and its evaluation if there was one, were finite. The step must have been finalized."""
    return not recorder.nonfinite_steps.in_a_row and (progress.dev is None or progress.dev.is_finite)
