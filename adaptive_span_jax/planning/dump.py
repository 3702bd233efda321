"""The train step compiled for a TPU that is not here, with the compiler's schedule of every operation.

The compiler takes what it is to write down from LIBTPU_INIT_ARGS, which has to be set before JAX loads it. So a child
process compiles: nothing changes in the environment of this one.
"""

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.planning import bundles, hlo
from adaptive_span_jax.planning.topology import Machine
from adaptive_span_jax.runtime import sharding, strict_json, terminal

# Schedules of operations that are equal would be written down once, under the name of one of them.
_COMPILER_FLAGS = (
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final_bundles",
    "--xla_jf_hlo_deduplication_all_unique=true",
)
_SCHEDULE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_PROGRAM = "TLP"  # the program around the operations
HLO_FILE = "step.hlo"


@dataclasses.dataclass(frozen=True)
class Dump:
    """A compiled program and its schedules."""

    program: hlo.Program
    control: bundles.Block  # the code between the operations
    schedules: dict[str, bundles.Block]  # of operations, by their name in the program


def compile_step(config: Config, machine: Machine) -> Dump:
    """Compiles the train step for a TPU slice in a child process."""
    if machine.chip.platform != "tpu":
        raise UserError(f"--topology={machine.topology}: only the TPU compiler's schedules can be read")
    job = {"config": strict_json.loads(config.to_json()), "topology": machine.topology}
    command = [sys.executable, "-m", "adaptive_span_jax.planning.dump"]
    return run(command, job, f"compiling for {machine.topology} with its schedule")


def run(command: list[str], job: dict[str, Any], title: str) -> Dump:
    """Runs a command that compiles one program for a TPU, and reads what the compiler wrote down.

    It gets `job` and the `folder` of the schedules as JSON, and writes the program's text into that folder's HLO_FILE.
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
        with terminal.waiting("reading the schedules"):
            return read(Path(folder), (Path(folder) / HLO_FILE).read_text())


def read(folder: Path, text: str) -> Dump:
    """Reads a folder of schedules and the program they belong to."""
    found = {}
    for path in sorted(folder.iterdir()):
        if name := _SCHEDULE.fullmatch(path.name):
            try:
                found[name[1]] = bundles.parse(path.read_text(errors="replace"))
            except bundles.ScheduleError as error:
                raise bundles.ScheduleError(f"{name[1]}: {error}") from error
    if _PROGRAM not in found:
        raise bundles.ScheduleError(
            "the compiler wrote no schedules: another version of libtpu may name its flags otherwise"
        )
    return Dump(hlo.parse(text), found.pop(_PROGRAM), found)


def _compile(job: dict[str, Any]) -> None:
    """The child's part: compiles, and leaves the program's text beside the schedules."""
    from adaptive_span_jax.planning import fit

    config = Config.from_dict(job["config"])
    mesh = sharding.make_mesh(Machine.parse(job["topology"]).devices(), config.mesh.fsdp)
    text = fit.lower(config, mesh).compile().as_text()
    (Path(job["folder"]) / HLO_FILE).write_text(text or "")


if __name__ == "__main__":
    _compile(strict_json.loads(sys.stdin.read()))
