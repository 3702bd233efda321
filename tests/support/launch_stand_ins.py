"""Stand-ins for gcloud, kubectl, sbatch and others, which record their calls."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / ".ci" / "run"])

SLICE = ["--name=span", "--zone=us-west4-a"]
TRAIN = ["--", "--config=configs/enwik8_large.py"]
ODD = "--workdir=/a b&c\"'$(touch oops);*"  # all that an unquoted variable would trip over

# Answers come from files beside the stand-in, one line a call: a state to print, an exit code, or `run` to do as told.
STAND_IN = """#!{python} -S
import json, subprocess, sys
from pathlib import Path
here, name, words = Path({here!r}), {name!r}, sys.argv[1:]
if name == "kubectl" and "apply" in words:
    words.append(sys.stdin.read())
with open(here / "calls", "a") as file:
    file.write(json.dumps([name, *words]) + "\\n")
answers = here / next((word for word in ("describe", "ssh") if word in words), name)
if answers.exists():
    answer, *rest = answers.read_text().splitlines() or ["0"]
    answers.write_text("\\n".join(rest))
    if answer == "run":
        command = next(word for word in words if word.startswith("--command=")).partition("=")[2]
        sys.exit(subprocess.run(["bash", "-c", command], cwd=here / "home").returncode)
    if answer.isdigit():
        sys.exit(int(answer))
    print(answer)
"""


class StandIns:
    """Programs that record their arguments."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.programs = directory / "programs"
        self.programs.mkdir()
        (directory / "home").mkdir()
        for name in ("gcloud", "kubectl", "sbatch", "srun", "scontrol", "nvidia-smi"):
            (self.programs / name).write_text(STAND_IN.format(python=sys.executable, here=str(directory), name=name))
            (self.programs / name).chmod(0o755)

    def answer(self, what: str, *lines: str | int) -> None:
        """What the next calls of `what` (describe, ssh or a program's name) answer."""
        (self.directory / what).write_text("\n".join(map(str, lines)))

    def calls(self) -> list[list[str]]:
        """Every call so far: the program's name and its arguments."""
        file = self.directory / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def run(self, script: str | Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """A launch script, started where the stand-ins come first."""
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(LAUNCH / script), *arguments],
            env={**os.environ, "PATH": path, "POLL_SECONDS": "0", "TMPDIR": str(self.directory), **environment},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=300,
        )


def commands(output: str) -> list[list[str]]:
    """The commands of a dry run, as a shell would split them. (A word in $'…' is left as it is.)"""
    lines = [line for line in output.splitlines() if not line.startswith("#")]
    return [shlex.split(line) for line in lines if "$'" not in line]
