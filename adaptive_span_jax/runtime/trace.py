"""Traces of the JAX profiler: recording one, and how long each operation of a compiled program took in it.

    FOLDER/plugins/profile/SESSION/HOST.xplane.pb       what TensorBoard and XProf open, and what is read here
    FOLDER/plugins/profile/SESSION/HOST.trace.json.gz   the same for ui.perfetto.dev

A trace consists of planes (a device, or the host) with lines (a thread, a stream, or a TPU's units) of timed events. On
CPUs and GPUs the events of operations carry the operation's name as `hlo_op`; on TPUs they have a line to themselves.
"""

import contextlib
import re
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

Sources = Mapping[str, str]  # operation → the part of the Python program that it comes from

_SOURCE_WIDTH = 60  # of a shortened source
_DEVICE_LINES = ("XLA Ops", "Stream #")  # of TPUs, of GPUs


class Operation(NamedTuple):
    """An operation of a compiled program: how often it ran, and how long in all without operations inside it."""

    name: str
    count: int
    seconds: float


class Event(NamedTuple):
    """One execution of an operation."""

    name: str
    start_ns: float
    duration_ns: float


@contextlib.contextmanager
def recording(folder: Path) -> Iterator[str]:
    """A context whose computations are traced into a folder; yields the name of the session."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would be most of the trace
    options.session_id = time.strftime("%Y_%m_%d_%H_%M_%S")
    with jax.profiler.trace(str(folder), profiler_options=options):
        yield options.session_id


def read_operations(folder: Path, session: str) -> list[Operation]:
    """The operations in the trace of a session, the most expensive first."""
    files = sorted((folder / "plugins" / "profile" / session).glob("*.xplane.pb"))
    return total(line for file in files for line in _lines(file))


def total(lines: Iterable[Iterable[Event]]) -> list[Operation]:
    """Adds up the events of lines by operation, the most expensive first. An event includes those within its time."""
    counts: defaultdict[str, int] = defaultdict(int)
    nanoseconds: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        around: list[Event] = []  # the events that have not ended, the outermost first
        for event in sorted(line, key=lambda event: (event.start_ns, -event.duration_ns)):
            while around and around[-1].start_ns + around[-1].duration_ns <= event.start_ns:
                around.pop()
            if around:
                nanoseconds[around[-1].name] -= event.duration_ns
            counts[event.name] += 1
            nanoseconds[event.name] += event.duration_ns
            around.append(event)
    found = [Operation(name, counts[name], nanoseconds[name] / 1e9) for name in counts]
    return sorted(found, key=lambda operation: -operation.seconds)


def sources(program: str) -> Sources:
    """Where operations come from, by a compiled program's text."""
    return dict(re.findall(r'^\s*(?:ROOT )?%?(\S+) = .*metadata=\{.*?op_name="([^"]+)"', program, re.MULTILINE))


def shortened(source: str) -> str:
    """A source for a table: its innermost part."""
    source = source.removeprefix("jit(train_step)/")
    return source if len(source) <= _SOURCE_WIDTH else f"…{source[1 - _SOURCE_WIDTH :]}"


def _lines(file: Path) -> Iterator[list[Event]]:
    with warnings.catch_warnings():
        # Python 3.12 complains about the types of jaxlib's binding.
        warnings.filterwarnings("ignore", "builtin type .* has no __module__ attribute", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                on_device = plane.name.startswith("/device:") and (line.name or "").startswith(_DEVICE_LINES)
                events = []
                for event in line.events:
                    name = next((value for key, value in event.stats if key == "hlo_op"), None)
                    if name or on_device:
                        # A TPU's events are named by their whole instruction: "%fusion.3 = bf16[8,128] fusion(…".
                        name = name or event.name.partition(" = ")[0].removeprefix("%")
                        events.append(Event(name, event.start_ns, event.duration_ns))
                yield events
