"""Records training: waits for each step, counts and shows it, and logs metrics at intervals."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import span
from adaptive_span_jax.training import objective
from adaptive_span_jax.training.goodput import Goodput
from adaptive_span_jax.training.metrics import MetricsLog, Window, utilization
from adaptive_span_jax.training.nonfinite_steps import NonFiniteSteps
from adaptive_span_jax.training.step import Metrics


class Recorder:
    """Takes the metrics of steps, in order. `show` is called with each finished step and a line of text."""

    def __init__(
        self,
        config: Config,
        unit: str,
        mesh: Mesh,
        log: MetricsLog,
        nonfinite_steps: NonFiniteSteps,
        goodput: Goodput,
        show: Callable[[int, str], None],
    ):
        self.log, self.nonfinite_steps, self._goodput = log, nonfinite_steps, goodput
        self._config, self._unit, self._mesh, self._show = config, unit, mesh, show
        self._window, self._recent = Window(), deque[float](maxlen=50)

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """A context for fetching the next segment, which a step has to wait for."""
        started = time.perf_counter()
        yield
        self._window.wait(time.perf_counter() - started)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context for work other than training."""
        started = time.perf_counter()
        with self._goodput.paused():
            yield
        self._window.pause(time.perf_counter() - started)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context for saving and for waiting for a save, which tokens per second include but goodput does not."""
        with self._goodput.paused():
            yield

    def finalize_step(self, step: int, metrics: Metrics) -> None:
        """Waits for a step, then counts, shows and logs it; raises after too many consecutive non-finite ones."""
        metrics = jax.device_get(metrics)
        self._goodput.end_step(bool(metrics.good))
        self.nonfinite_steps.count(step, bool(metrics.good))
        self._window.add(float(metrics.nats))
        self._recent.append(float(metrics.nats))
        self._show(step, self._describe(metrics))
        if step % self._config.log.every_steps == 0:
            self._write(step, metrics)
            self._window = Window()

    def _describe(self, metrics: Metrics) -> str:
        finite = [nats for nats in self._recent if math.isfinite(nats)]
        bits = objective.bits(sum(finite) / len(finite)) if finite else math.nan
        z_LH, limits = np.asarray(metrics.z_LH), (self._config.span.ramp, self._config.span.limit)
        average, longest = span.average_span(z_LH, *limits), span.head_spans(z_LH, *limits).max()
        return (
            f"{bits:.3f} bits per {self._unit}  {self._tokens_per_second():,.0f} tokens/s  "
            f"span {average:.1f} on average, {longest:.1f} longest"
        )

    def _write(self, step: int, metrics: Metrics) -> None:
        z_LH = np.asarray(metrics.z_LH)
        ramp, limit = self._config.span.ramp, self._config.span.limit
        average, tokens = float(span.average_span(z_LH, ramp, limit)), self._tokens_per_second()
        mfu = utilization(self._config, average, tokens, list(self._mesh.devices.flat))
        scalars = {
            "train_bits": objective.bits(self._window.nats),
            "penalty_nats": float(metrics.penalty_nats),
            "learning_rate": float(metrics.learning_rate),
            "average_span": average,
            "longest_span": float(span.head_spans(z_LH, ramp, limit).max()),
            "nonfinite_steps": self.nonfinite_steps.total,
            "far_tiles": float(metrics.cost.far_tiles),
            "multiply_adds_per_token": float(metrics.cost.executed),
            "published_multiply_adds_per_token": float(metrics.cost.published),
            "tokens_per_second": tokens,
            "tokens_per_second_per_device": tokens / self._mesh.size,
            "flops_utilisation": mfu,  # its name in logs of earlier versions
            "mfu": mfu,
            "goodput": self._goodput.share,
            "wall_seconds": self._goodput.wall_seconds,
            "input_share": self._window.input_share,
        }
        # After a non-finite step some numbers are not finite, and the peak of some devices is unknown.
        self.log.write(step, {name: value for name, value in scalars.items() if math.isfinite(value)})
        if np.isfinite(z_LH).all():
            self.log.write_spans(step, z_LH, ramp, limit)

    def _tokens_per_second(self) -> float:
        return self._config.train.batch_size * self._config.train.segment / self._window.seconds_per_step
