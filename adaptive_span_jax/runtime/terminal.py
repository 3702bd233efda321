"""Output on the terminal: blocks of facts, progress, tables."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_LINE_EVERY_SECONDS = 30  # progress of long work without a terminal

console = Console(highlight=False, soft_wrap=True)


@contextmanager
def messages_on_stderr() -> Iterator[None]:
    """Blocks, lines and progress go to stderr, so that stdout has nothing but a command's data."""
    console.stderr = True
    try:
        yield
    finally:
        console.stderr = False


def show_block(title: str, rows: dict[str, str]) -> None:
    """Prints a titled block of facts, one per line, unwrapped so that commands can be copied."""
    console.print(f"[bold]{title}[/bold]")
    widest = max(len(name) for name in rows)
    for name, value in rows.items():
        console.print(Text(f"  {name:<{widest}}  ", style="cyan") + Text(value, style="default"))


def say(message: str) -> None:
    """Prints one line, above the progress bar if there is one."""
    console.print(message, markup=False)


def size(count: float) -> str:
    """Bytes in a readable unit."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:,.1f} PiB"


def counted(count: int, noun: str) -> str:
    """A number and what it counts: 1 byte, 2 bytes."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


class _TrainingBar(Progress):
    """Always shows step, total and time left, then as much of the description as fits; the bar takes the rest.

    In a narrow terminal, rich's own columns would all be truncated, the step first.
    """

    _SHORTEST_BAR = 4

    def __init__(self) -> None:
        super().__init__(console=console, refresh_per_second=4)
        self._time_left = TimeRemainingColumn(compact=True)

    def get_renderables(self) -> Iterator[Table]:
        """One line per task."""
        for task in self.tasks:
            yield self._line(task)

    def _line(self, task: Task) -> Table:
        step = Text(f"step {task.completed:,.0f}/{task.total:,.0f}")
        left = self._time_left.render(task) + Text(" left")
        room = self.console.width - len(step) - len(left) - 1
        parts = task.description.split("  ")
        while parts and len("  ".join(parts)) + self._SHORTEST_BAR + 2 > room:
            parts.pop()
        cells: list[Text | ProgressBar] = [step]
        bar = room - 1 - (len("  ".join(parts)) + 1 if parts else 0)
        if bar >= self._SHORTEST_BAR:
            cells.append(ProgressBar(total=task.total, completed=task.completed, width=bar))
        if parts:
            cells.append(Text("  ".join(parts)))
        line = Table.grid(padding=(0, 1))
        line.add_row(*cells, left)
        return line


class TrainingProgress:
    """A progress bar in a terminal; elsewhere a plain line every `line_every` steps."""

    def __init__(self, first: int, steps: int, line_every: int):
        self._first, self._steps, self._line_every = first, steps, line_every
        self._started = time.monotonic()
        self._progress = _TrainingBar()
        self._task = self._progress.add_task("compiling …", total=steps, completed=first)

    def __enter__(self) -> "TrainingProgress":
        if console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if console.is_terminal:
            self._progress.stop()

    def show(self, step: int, text: str) -> None:
        """Shows that step `step` is done."""
        if console.is_terminal:
            self._progress.update(self._task, completed=step, description=text)
        elif step % self._line_every == 0 or step == self._steps:
            rate = (step - self._first) / (time.monotonic() - self._started)
            left = f", {duration((self._steps - step) / rate)} left" if step < self._steps else ""
            say(f"step {step:,}/{self._steps:,}  {text}{left}")


@contextmanager
def share_done(title: str) -> Iterator[Callable[[float], None]]:
    """A progress bar, or lines without a terminal; call the yielded function with the completed fraction."""
    if not console.is_terminal:
        say(f"{title} …")
        started = printed = time.monotonic()

        def show(share: float) -> None:
            nonlocal printed
            now = time.monotonic()
            if now - printed >= _LINE_EVERY_SECONDS and 0 < share < 1:
                printed = now
                left = (now - started) * (1 - share) / share
                say(f"{title}: {int(100 * share)} %, {duration(left)} left")

        yield show
        return
    with Progress(
        TextColumn(title), BarColumn(), TextColumn("{task.percentage:.0f} %"), console=console, transient=True
    ) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda share: progress.update(task, completed=share)


@contextmanager
def waiting(title: str) -> Iterator[None]:
    """A spinner with the elapsed time, for work without progress reports; without a terminal only the title."""
    if not console.is_terminal:
        say(f"{title} …")
        yield
        return
    columns = (SpinnerColumn(), TextColumn(f"{title} …"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(title, total=None)
        yield


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints a plain table with numbers right-aligned, unwrapped so that it can be copied."""
    widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
    for number, row in enumerate([columns, *rows]):
        first, *others = (
            f"{cell:>{width}}" if index else f"{cell:<{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        console.print(Text("  " + "  ".join([first, *others]), style="cyan" if number == 0 else "default"))
