"""The train step compiled for a TPU that is not here, with the compiler's schedule of every operation.

The compiler takes what it is to write down from LIBTPU_INIT_ARGS, which has to be set before JAX loads it. So a child
process compiles: nothing changes in the environment of this one.
"""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.planning import bundles, fit, hlo
from adaptive_span_jax.planning.fit import Fit
from adaptive_span_jax.planning.topology import Machine
from adaptive_span_jax.runtime import strict_json, terminal

# Schedules of operations that are equal would be written down once, under the name of one of them.
_COMPILER_FLAGS = (
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final_bundles|final_hlo",
    "--xla_jf_hlo_deduplication_all_unique=true",
)
_SCHEDULE = re.compile(r"(\d+-(.+))-\d+-final_bundles\.txt")
_UTILIZATION = re.compile(r"(\d+-.+)-\d+-final_hlo-static-per-bundle-utilization\.txt")
_PROGRAM = "TLP"  # the program around the operations
_FIT_FILE = "fit.json"


@dataclasses.dataclass(frozen=True)
class Dump:
    """A compiled program and its schedules."""

    program: hlo.Program
    control: bundles.Block  # the code between the operations
    schedules: dict[str, bundles.Block]  # of operations, by their name in the program


def compile_step(config: Config, machine: Machine) -> tuple[Fit, Dump | None]:
    """Compiles the train step for a TPU slice in a child process; no schedules if it does not fit at all."""
    if machine.chip.platform != "tpu":
        raise UserError(f"--topology={machine.topology}: only the TPU compiler's schedules can be read")
    job = {"config": strict_json.loads(config.to_json()), "topology": machine.topology}
    command = [sys.executable, "-m", "adaptive_span_jax.planning.dump"]
    with run(command, job, f"compiling for {machine.topology} with its schedule") as folder:
        found = Fit(**strict_json.loads((folder / _FIT_FILE).read_text()))
        if not found.program:
            return found, None
        with terminal.waiting("reading the schedules"):
            return found, read(folder, found.program)


@contextlib.contextmanager
def run(command: list[str], job: dict[str, Any], title: str) -> Iterator[Path]:
    """Runs a command that compiles one program for a TPU; within it, the compiler's schedules are in a folder.

    The command gets `job` and the `folder` as JSON, and may write other files there.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = (os.environ.get("LIBTPU_INIT_ARGS", ""), f"--xla_jf_dump_to={folder}", *_COMPILER_FLAGS)
        root = str(Path(__file__).parents[2])
        environment = {
            **os.environ,
            "LIBTPU_INIT_ARGS": " ".join(filter(None, flags)),
            "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is not compiled is not written down
        }
        with terminal.waiting(title):
            done = subprocess.run(
                command,
                input=strict_json.dumps({**job, "folder": folder}),
                env=environment,
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise UserError(f"{title} failed:\n{done.stderr.strip()[-2000:]}")
        yield Path(folder)


def read(folder: Path, text: str) -> Dump:
    """Reads a folder of schedules and the program they belong to."""
    files = sorted(folder.iterdir())
    units = {found[1]: path for path in files if (found := _UTILIZATION.fullmatch(path.name))}
    schedules = {}
    for path in files:
        if found := _SCHEDULE.fullmatch(path.name):
            utilization = units[found[1]].read_text() if found[1] in units else ""
            try:
                schedules[found[2]] = bundles.parse(path.read_text(errors="replace"), utilization)
            except bundles.ScheduleError as error:
                raise bundles.ScheduleError(f"{found[2]}: {error}") from error
    if _PROGRAM not in schedules:
        raise bundles.ScheduleError(
            "the compiler wrote no schedules: another version of libtpu may name its flags otherwise"
        )
    return Dump(hlo.parse(text), schedules.pop(_PROGRAM), schedules)


def _compile(job: dict[str, Any]) -> None:
    """The child's part: compiles, and leaves what the step takes and its program beside the schedules."""
    machine = Machine.parse(job["topology"])
    found = fit.compile_for(Config.from_dict(job["config"]), machine, machine.devices())
    (Path(job["folder"]) / _FIT_FILE).write_text(strict_json.dumps(dataclasses.asdict(found)))


if __name__ == "__main__":
    _compile(strict_json.loads(sys.stdin.read()))
