"""Commands that are printed for users to paste. A run's own `config.json` is enough, so they stay short."""

import shlex
from pathlib import Path

_MAIN = Path(__file__).resolve().parents[1] / "main.py"


def command(workdir: Path, **flags: object) -> str:
    """A command for a run, quoted for the shell; `flags` are those of `main.py` besides --workdir."""
    # The workdir may be relative to the current directory, which need not be the project's.
    program = "main.py" if Path.cwd() == _MAIN.parent else str(_MAIN)
    named = [f"--{name}={value}" for name, value in flags.items()]
    return shlex.join(["python", program, f"--workdir={workdir}", *named])
