"""What each `--mode` does and which flags it takes: one table for `--help` and for refusing all others."""

import dataclasses
import fnmatch
import textwrap
from collections.abc import Iterable

from adaptive_span_jax.errors import UserError

_HOSTS = ("coordinator", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A mode; --config and --workdir are taken by all of them."""

    does: str
    flags: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()  # of the config; `data.FIELD` means all of that group, `FIELD` all there are


MODES = {
    "train": Mode("train a model, or resume its run; evaluate it at the end", ("expect_devices", *_HOSTS), ("FIELD",)),
    "evaluate": Mode(
        "score a checkpoint on dev and test",
        ("step", *_HOSTS),
        ("evaluate.FIELD", "data.archive", "data.directory"),
    ),
    "report": Mode("write report/index.html, figures and tables", ("step",), ("data.archive", "data.directory")),
    "generate": Mode("continue a prompt", ("prompt", "prompt_file", "step"), ("generate.FIELD",)),
    "compress": Mode("compress a file by the model's probabilities", ("input", "output", "step")),
    "decompress": Mode("restore a compressed file", ("input", "output", "step")),
    "import-torch": Mode("create a run from a published PyTorch checkpoint", ("input",), ("FIELD",)),
    "export-torch": Mode("write a run's checkpoint in the published PyTorch format", ("output", "step")),
    "verify": Mode("compare all checkpoints with their checksums"),
    "prepare": Mode("download and prepare the data", _HOSTS, ("data.FIELD",)),
    "plan": Mode("compile the train step for another machine: memory and speed", ("topology",), ("FIELD",)),
    "doctor": Mode("check this machine, the data and the workdir", ("expect_devices", *_HOSTS), ("FIELD",)),
}

# The placeholder and the meaning of each flag.
FLAGS = {
    "config": ("NAME", "a config of configs/, or a file; some take an argument (NAME:2048)"),
    "config.FIELD": ("VALUE", "override a config field; see adaptive_span_jax/config.py"),
    "workdir": ("RUN", "the run's directory or gs://BUCKET/RUN; default: runs/<config name>"),
    "step": ("STEP", "the checkpoint: latest (default), best or a step"),
    "prompt": ("TEXT", "the text to continue"),
    "prompt_file": ("FILE", "a file with the text to continue"),
    "input": ("FILE", "the file to read"),
    "output": ("FILE", "the file to write; default: the input's name with .adspan added or removed"),
    "topology": ("MACHINE", "the machine to plan for, e.g. v5e:2x4, a100:8 or h100:2x8"),
    "expect_devices": ("N", "stop unless there are exactly N devices; default: any number"),
    "coordinator": ("HOST:PORT", "address of process 0; found automatically on Cloud TPU, Slurm, Open MPI"),
    "num_processes": ("N", "number of processes, with --coordinator"),
    "process_id": ("I", "number of this process, from 0, with --coordinator"),
}


def refuse_unused(mode: str, given: Iterable[str], fields: Iterable[str]) -> None:
    """Refuses flags and config fields that a mode does not use: what is given and ignored would mislead."""
    for flag in given:
        if flag not in MODES[mode].flags:
            users = [name for name, other in MODES.items() if flag in other.flags]
            raise UserError(f"--{flag} is for --mode={_listed(users, 'or')}, not for {mode}")
    allowed = MODES[mode].fields
    for field in fields:
        if not any(fnmatch.fnmatchcase(field, each.replace("FIELD", "*")) for each in allowed):
            takes = (
                f"takes only {_listed([f'--config.{each}' for each in allowed], 'and')}" if allowed else "takes none"
            )
            own = "" if mode == "prepare" else "; all else is the checkpoint's own"
            raise UserError(f"--config.{field} is not used by --mode={mode}, which {takes}{own}")


def usage() -> str:
    """The text of `--help` after the examples."""
    lines = ["Modes, --mode=MODE (default: train), with the flags that each takes besides --config and --workdir:"]
    for name, mode in MODES.items():
        lines.append(f"  {name:<14}{mode.does}")
        taken = " ".join(f"--{flag}" for flag in [*mode.flags, *(f"config.{field}" for field in mode.fields)])
        lines += [f"  {'':<14}{part}" for part in textwrap.wrap(taken, 90, break_on_hyphens=False)]
    lines += ["", "Flags:"]
    lines += [f"  {f'--{name}={value}':<26}{meaning}" for name, (value, meaning) in FLAGS.items()]
    return "\n".join(lines)


def _listed(names: list[str], last: str) -> str:
    return f" {last} ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])
