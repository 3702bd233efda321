"""Output in terminals of any width."""

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from adaptive_span_jax.runtime import terminal

REST = "2.345 bits per byte  12,345 tokens/s  span 64 on average, 1,203 longest"


def last_line(monkeypatch, width: int, first: int = 0) -> str:
    """What stands in a terminal of this width after a few steps of a long run."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=width, highlight=False, soft_wrap=True)
    monkeypatch.setattr(terminal, "console", console)
    with terminal.TrainingProgress(first, 600_000, 100) as progress:
        for step in range(first + 1, first + 4):
            progress.show(step, REST)
    printed = Text.from_ansi(output.getvalue().replace("\r", "\n")).plain
    return [line for line in printed.splitlines() if line.strip()][-1]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
@pytest.mark.parametrize("first", [0, 123_455])
def test_step_total_and_time_left_are_never_cut(monkeypatch, width, first):
    line = last_line(monkeypatch, width, first)
    assert len(line) <= width
    assert re.fullmatch(rf"step {first + 3:,}/600,000 .*\d\d:\d\d left *", line), line


@pytest.mark.parametrize(("width", "kept"), [(40, 0), (60, 1), (80, 2), (120, 3), (200, 3)])
def test_the_rest_is_dropped_part_by_part_from_its_end(monkeypatch, width, kept):
    line = last_line(monkeypatch, width)
    parts = REST.split("  ")
    assert [part in line for part in parts] == [True] * kept + [False] * (3 - kept), line
    assert "…" not in line


def test_sizes_and_counts_are_readable():
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 2**30: "1.0 GiB", 2**40: "1.0 TiB", 3 * 2**49: "1.5 PiB"}
    assert {count: terminal.size(count) for count in sizes} == sizes
    assert terminal.size(2**63) == "8,192.0 PiB"
    assert [terminal.counted(count, "byte") for count in (0, 1, 2, 1234)] == [
        "0 bytes",
        "1 byte",
        "2 bytes",
        "1,234 bytes",
    ]
    assert terminal.counted(2, "process") == "2 processes"
