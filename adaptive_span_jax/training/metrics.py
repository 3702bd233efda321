"""The logs of a run: `metrics.jsonl`, `spans.jsonl` and TensorBoard events."""

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
    """Averages over the steps since the last log line."""

    def __init__(self) -> None:
        self.steps = 0
        self._nats, self._finite = 0.0, 0
        self._waited = 0.0
        self._paused = 0.0
        self._started = time.perf_counter()

    def add(self, nats: float) -> None:
        """Adds a step. A non-finite loss counts only for the time."""
        self.steps += 1
        if math.isfinite(nats):
            self._nats += nats
            self._finite += 1

    def wait(self, seconds: float) -> None:
        """Adds time spent fetching a segment, during which no step could start."""
        self._waited += seconds

    def pause(self, seconds: float) -> None:
        """Adds time not spent on training."""
        self._paused += seconds

    @property
    def nats(self) -> float:
        """The mean loss over the steps."""
        return self._nats / self._finite if self._finite else math.nan

    @property
    def seconds_per_step(self) -> float:
        """The training time per step."""
        return (time.perf_counter() - self._started - self._paused) / self.steps

    @property
    def input_share(self) -> float:
        """The fraction of training time spent fetching segments."""
        return self._waited / (self.seconds_per_step * self.steps)


class MetricsLog:
    """Appends to the logs of a run. When resuming, lines after the checkpoint are removed first.

    Without a workdir nothing is written, because another host does it.
    """

    def __init__(self, workdir: Path | None, resumed_at: int, draw_spans: SpanPicture | None = None):
        """`draw_spans` draws the spans for TensorBoard; it is passed in because training does not import the report."""
        self._draw_spans = draw_spans
        self._tensorboard: SummaryWriter | None = None
        self.staged: storage.Staged | None = None
        self.wall_seconds = 0.0  # of the run up to the last line, including those that are removed
        if workdir is None:
            return
        self.staged = storage.Staged(workdir, ("metrics.jsonl", "spans.jsonl"))
        folder = self.staged.folder
        self._metrics, self._spans = folder / "metrics.jsonl", folder / "spans.jsonl"
        self.wall_seconds = max((line.get("wall_seconds", 0.0) for line in read_lines(self._metrics)), default=0.0)
        for path in (self._metrics, self._spans):
            _remove_lines_after(path, resumed_at)
        if self.wall_seconds:  # also for the next process, should this one be killed before its first line
            _append(self._metrics, {"step": resumed_at, "wall_seconds": self.wall_seconds})
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1, flush_secs=10)
        writer: Any = self._tensorboard.file_writer
        events = writer.event_writer._ev_writer
        events._py_recordio_writer = _ErrorTolerantFile(events._py_recordio_writer)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Writes one line, and one TensorBoard point per number."""
        if self._tensorboard is None:
            return
        _append(self._metrics, {"step": step, **scalars})
        for name, value in strict_json.finite(scalars).items():
            if value is not None:
                self._tensorboard.add_scalar(name, value, step)

    def write_spans(self, step: int, z_LH: np.ndarray, ramp: int, limit: int) -> None:
        """Writes the heads' spans: one line with z in positions, a histogram per layer, a heat map."""
        if self._tensorboard is None:
            return
        _append(self._spans, {"step": step, "z_LH": np.round(z_LH.astype(np.float64), 1).tolist()})
        for layer, z_H in enumerate(z_LH, start=1):
            self._tensorboard.add_histogram(f"span/layer_{layer:02d}", head_spans(z_H, ramp, limit), step)
        if self._draw_spans is not None:
            self._tensorboard.add_image("spans", self._draw_spans(z_LH, ramp, limit), step, dataformats="HWC")

    def write_text(self, step: int, name: str, text: str) -> None:
        """Writes a text to TensorBoard."""
        if self._tensorboard is not None:
            self._tensorboard.add_text(name, text, step)

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The lines of both logs so far."""
        return ([], []) if self.staged is None else (read_lines(self._metrics), read_lines(self._spans))

    def close(self) -> None:
        """Flushes and closes the logs."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self.staged is not None:
            self.staged.close()


class _ErrorTolerantFile:
    """A file of TensorBoard events that ignores write errors such as a full disk.

    tensorboardX writes in a thread. An error would end it, and training would wait forever on its full queue.
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
    """The lines of a log, ordered by step, without a line that was truncated by a kill.

    Numbers that were non-finite (null) are removed from their lines.
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
        terminal.say(f"warning: could not write step {line['step']:,} to {path} ({error.strerror})")


def _remove_lines_after(path: Path, resumed_at: int) -> None:
    """Removes the lines after a step."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= resumed_at]
        storage.write_text(path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    # A truncated line is treated like one after the checkpoint.
    try:
        return strict_json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def utilization(config: Config, average_span: float, tokens_per_second: float, devices: list[jax.Device]) -> float:
    """The model FLOPs utilization (MFU) of training; NaN if the devices' peak is unknown.

    Counts what the model needs by the paper's formula, with two FLOPs per multiply-add and a backward pass of twice the
    forward pass. Position scores, masked parts of tiles, rematerialization and the output layer are not counted.
    """
    peaks = chips.PEAK.get(devices[0].device_kind)
    if peaks is None or config.model.compute_dtype == "float64":
        return math.nan
    peak = peaks[0 if config.model.compute_dtype == "bfloat16" else 1] * len(devices)
    return 6 * flops.paper_flops(config, average_span) * tokens_per_second / peak
