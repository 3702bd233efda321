"""Runs in separate processes, to be killed and compared."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax

from adaptive_span_jax.checkpoint import sealing

ROOT = Path(__file__).parents[2]


INTERVAL, WARMUP, EPOCH = 12, 60, 42


BETWEEN_SAVES = 10  # four fifths of an interval


ENDLESS = {"train.steps": 100_000}


# Two streams of a little text, an epoch of which has at most EPOCH steps. Dropout on. Spans that move.
FIELDS = {
    "model.layers": 2,
    "model.width": 16,
    "model.heads": 2,
    "model.feedforward": 16,
    "model.dropout": 0.2,
    "span.limit": 24,
    "span.ramp": 4,
    "span.penalty": 1e-3,
    "train.batch_size": 2,
    "train.segment": 8,
    "train.warmup_steps": WARMUP,
    "data.max_bytes": 750,
    "evaluate.batch_size": 2,
    "evaluate.every_steps": 10_000,
    "checkpoint.every_steps": INTERVAL,
    "log.every_steps": 1,
}


# main.py without pictures, which take longer than all the rest of so small a run.
NO_PICTURES = """
import runpy
from adaptive_span_jax.training import metrics
from adaptive_span_jax.report import report

metrics.MetricsLog.write_spans = report.write_report = lambda *_: None
runpy.run_path("main.py", run_name="__main__")
"""


class Life:
    """One process of a run, from its start to its end."""

    def __init__(self, workdir: Path, cache: Path, fields: dict[str, Any], program: str = NO_PICTURES):
        command = [
            sys.executable,
            "-c",
            program,
            f"--workdir={workdir}",
            *(f"--config.{k}={v}" for k, v in (FIELDS | fields).items()),
        ]
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.printed = ""
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.printed += line
            self._lines.put(line)

    def wait_for(self, text: str, times: int) -> None:
        """Returns when so many lines with a text have been printed, or the process has ended."""
        seen = self.printed.count(text)
        while seen < times and self.process.poll() is None:
            try:
                seen += text in self._lines.get(timeout=0.05)
            except queue.Empty:
                continue

    def end(self, number: signal.Signals | None = None) -> int:
        """Sends a signal, waits for the end, answers the exit code."""
        if number is not None:
            self.process.send_signal(number)
        self.process.wait()
        self._reader.join()
        assert self.process.stdout
        self.process.stdout.close()
        assert "Traceback" not in self.printed, self.printed
        return self.process.returncode

    @property
    def started_at(self) -> int | None:
        if "from the beginning" in self.printed:
            return 0
        found = re.search(r"from step ([\d,]+)", self.printed)
        return int(found[1].replace(",", "")) if found else None

    @property
    def reported(self) -> int:
        """The last step that was reported as saved."""
        return max(map(_number, re.findall(r"^step ([\d,]+) is saved", self.printed, re.MULTILINE)), default=0)

    @property
    def reached(self) -> int:
        """The last step that was shown."""
        return max(map(_number, re.findall(r"^step ([\d,]+)/", self.printed, re.MULTILINE)), default=0)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def last_state(workdir: Path, step: int) -> tuple[Any, Any]:
    """All arrays of a checkpoint, and what determines how training continues."""
    from orbax.checkpoint import v1 as ocp

    folder = workdir / "checkpoints" / str(step)
    assert sealing.find_damage(folder) is None
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes: Any = ocp.checkpointables_metadata(str(folder)).metadata
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), dict(shapes))
    about = json.loads((folder / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
    return ocp.load_checkpointables(str(folder), abstract), {key: about[key] for key in ("position", "learning_rate")}
