"""What training writes down: `metrics.jsonl` and `spans.jsonl` for programs, TensorBoard events for people."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter

from adaptive_span_jax.config import Config
from adaptive_span_jax.model import flops
from adaptive_span_jax.model.span import head_spans
from adaptive_span_jax.runtime import chips, storage, strict_json, terminal

SpanPicture = Callable[[np.ndarray, int, int], np.ndarray]  # z_LH, ramp, limit → pixels


class Window:
    """The steps since the last line of the log, and the seconds that went by outside of them."""

    def __init__(self) -> None:
        self.steps = 0
        self._nats, self._finite = 0.0, 0
        self._waited = 0.0
        self._paused = 0.0
        self._started = time.perf_counter()

    def add(self, nats: float) -> None:
        """One more step is done. A loss that is not finite counts for the time only."""
        self.steps += 1
        if math.isfinite(nats):
            self._nats += nats
            self._finite += 1

    def wait(self, seconds: float) -> None:
        """The next segment took this long to fetch, and a step could not start before."""
        self._waited += seconds

    def pause(self, seconds: float) -> None:
        """This long something else than training was done."""
        self._paused += seconds

    @property
    def nats(self) -> float:
        """The mean over the steps."""
        return self._nats / self._finite if self._finite else math.nan

    @property
    def seconds_per_step(self) -> float:
        """Training time only."""
        return (time.perf_counter() - self._started - self._paused) / self.steps

    @property
    def input_share(self) -> float:
        """The share of training time that went into fetching segments."""
        return self._waited / (self.seconds_per_step * self.steps)


class MetricsLog:
    """Appends to the logs of a run; on resuming, what was logged after the checkpoint is taken back first.

    Without a workdir nothing is written: another host does it.
    """

    def __init__(self, workdir: Path | None, resumed_at: int, draw_spans: SpanPicture | None = None):
        """`draw_spans` makes TensorBoard's picture of the spans: drawing is the report's business."""
        self._draw_spans = draw_spans
        self._tensorboard: SummaryWriter | None = None
        self.staged: storage.Staged | None = None
        if workdir is None:
            return
        self.staged = storage.Staged(workdir, ("metrics.jsonl", "spans.jsonl"))
        folder = self.staged.folder
        self._metrics, self._spans = folder / "metrics.jsonl", folder / "spans.jsonl"
        for path in (self._metrics, self._spans):
            _take_back(path, resumed_at)
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1, flush_secs=10)
        writer: Any = self._tensorboard.file_writer
        events = writer.event_writer._ev_writer
        events._py_recordio_writer = _Forgiving(events._py_recordio_writer)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """One line and one TensorBoard point per number."""
        if self._tensorboard is None:
            return
        _append(self._metrics, {"step": step, **scalars})
        for name, value in strict_json.finite(scalars).items():
            if value is not None:
                self._tensorboard.add_scalar(name, value, step)

    def write_spans(self, step: int, z_LH: np.ndarray, ramp: int, limit: int) -> None:
        """The heads' spans: one line with z in positions, a histogram per layer, a heat map."""
        if self._tensorboard is None:
            return
        _append(self._spans, {"step": step, "z_LH": np.round(z_LH.astype(np.float64), 1).tolist()})
        for layer, z_H in enumerate(z_LH, start=1):
            self._tensorboard.add_histogram(f"span/layer_{layer:02d}", head_spans(z_H, ramp, limit), step)
        if self._draw_spans is not None:
            self._tensorboard.add_image("spans", self._draw_spans(z_LH, ramp, limit), step, dataformats="HWC")

    def write_text(self, step: int, name: str, text: str) -> None:
        """A remark, for TensorBoard's text page."""
        if self._tensorboard is not None:
            self._tensorboard.add_text(name, text, step)

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of both logs so far."""
        return ([], []) if self.staged is None else (read_lines(self._metrics), read_lines(self._spans))

    def close(self) -> None:
        """Writes out what TensorBoard still holds."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self.staged is not None:
            self.staged.close()


class _Forgiving:
    """A file of TensorBoard events that leaves out what a full disk does not take.

    tensorboardX writes in a thread. An error would end it, and training would wait forever to hand it the next point.
    """

    def __init__(self, file: Any):
        self._file = file

    def write(self, event: bytes) -> None:
        with contextlib.suppress(OSError):
            self._file.write(event)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log, in the order of their steps; one that a kill cut off is left out.

    A number that was not finite when it was written is left out of its line: whatever is there is a number.
    """
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines() if _step_of(line) < float("inf")]
    found = ({name: value for name, value in strict_json.loads(line).items() if value is not None} for line in lines)
    return sorted(found, key=lambda line: line["step"])


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        with path.open("a") as file:
            file.write(strict_json.dumps(line) + "\n")
    except OSError as error:
        terminal.say(f"warning: step {line['step']:,} is missing in {path} ({error.strerror})")


def _take_back(path: Path, resumed_at: int) -> None:
    """Removes what was logged after a step."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= resumed_at]
        storage.write_text(path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    # A line cut off by a kill is dropped like one from after the checkpoint.
    try:
        return strict_json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def utilization(config: Config, average_span: float, tokens_per_second: float, devices: list[jax.Device]) -> float:
    """The share of the devices' peak that training uses; not a number where the peak is not known.

    Only what the model needs counts, by the paper's formula: two operations per multiply-add, and a backward pass of
    twice the forward pass. What is computed besides (position scores, masked-out corners, layers computed again, the
    output layer) does not.
    """
    peaks = chips.PEAK.get(devices[0].device_kind)
    if peaks is None or config.model.compute_dtype == "float64":
        return math.nan
    peak = peaks[0 if config.model.compute_dtype == "bfloat16" else 1] * len(devices)
    return 6 * flops.paper_flops(config, average_span) * tokens_per_second / peak
