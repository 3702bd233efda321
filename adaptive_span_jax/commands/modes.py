"""What each `--mode` does and which flags it accepts: the table behind `--help` and the check for unused flags."""

import dataclasses
import fnmatch
import textwrap
from collections.abc import Iterable

from adaptive_span_jax.errors import UserError

_HOSTS = ("coordinator", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A mode. All modes accept --config and --workdir."""

    does: str
    flags: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()  # config fields; `data.FIELD` is every field of that section, `FIELD` every field


MODES = {
    "train": Mode("train a model or resume a run, and evaluate it at the end", ("expect_devices", *_HOSTS), ("FIELD",)),
    "evaluate": Mode(
        "score a checkpoint on dev and test, or on a file",
        ("step", "input", *_HOSTS),
        ("evaluate.FIELD", "data.archive", "data.directory"),
    ),
    "report": Mode("write report/index.html, figures and tables", ("step",), ("data.archive", "data.directory")),
    "generate": Mode("continue a prompt", ("prompt", "prompt_file", "step"), ("generate.FIELD",)),
    "compress": Mode("compress a file with the model's probabilities", ("input", "output", "step")),
    "decompress": Mode("restore a compressed file", ("input", "output", "step")),
    "import-torch": Mode("create a run from a published PyTorch checkpoint", ("input",), ("FIELD",)),
    "export-torch": Mode("write a run's checkpoint in the published PyTorch format", ("output", "step")),
    "export-weights": Mode("copy a run without optimizer state and memory, to share the model", ("output", "step")),
    "verify": Mode("verify the checksums of all checkpoints"),
    "prepare": Mode("download and prepare the data", _HOSTS, ("data.FIELD",)),
    "plan": Mode("compile the train step for other hardware; estimate memory and speed", ("topology",), ("FIELD",)),
    "profile": Mode("trace a few training steps; list the most expensive operations", _HOSTS, ("FIELD",)),
    "doctor": Mode("check this machine, the data and the workdir", ("expect_devices", *_HOSTS), ("FIELD",)),
}

# The placeholder and the meaning of each flag.
FLAGS = {
    "config": ("NAME", "a config in configs/, or a file; some take an argument (NAME:2048)"),
    "config.FIELD": ("VALUE", "override a config field; see adaptive_span_jax/config.py"),
    "workdir": ("RUN", "the run's directory or gs://BUCKET/RUN; default: runs/<config name>"),
    "step": ("STEP", "the checkpoint: latest (default), best (on dev) or a step number"),
    "prompt": ("TEXT", "the text to continue"),
    "prompt_file": ("FILE", "a file with the text to continue"),
    "input": ("FILE", "the file to read"),
    "output": ("FILE", "the file or run to write; default: the input's name with .adspan added or removed"),
    "topology": ("MACHINE", "the hardware to plan for, e.g. v5e:2x4, a100:8 or h100:2x8"),
    "expect_devices": ("N", "fail unless there are exactly N devices; default: any number"),
    "coordinator": ("HOST:PORT", "address of process 0; detected on Cloud TPU, Slurm and Open MPI"),
    "num_processes": ("N", "number of processes, with --coordinator"),
    "process_id": ("I", "index of this process, from 0, with --coordinator"),
}


def reject_unused(mode: str, given: Iterable[str], fields: Iterable[str]) -> None:
    """Raises on flags and config fields that a mode would ignore."""
    for flag in given:
        if flag not in MODES[mode].flags:
            users = [name for name, other in MODES.items() if flag in other.flags]
            raise UserError(f"--mode={mode} does not use --{flag}, which is for --mode={_listed(users, 'or')}")
    allowed = MODES[mode].fields
    for field in fields:
        if not any(fnmatch.fnmatchcase(field, each.replace("FIELD", "*")) for each in allowed):
            accepted = "no fields"
            if allowed:
                accepted = f"only {_listed([f'--config.{each}' for each in allowed], 'and')}"
                accepted += "" if mode == "prepare" else "; the others are set by the checkpoint"
            raise UserError(f"--mode={mode} does not use --config.{field}: it accepts {accepted}")


def usage() -> str:
    """The part of `--help` after the examples."""
    lines = [
        "Modes, --mode=MODE (default: train), and the flags that each accepts in addition to --config and --workdir:"
    ]
    for name, mode in MODES.items():
        lines.append(f"  {name:<16}{mode.does}")
        taken = " ".join(f"--{flag}" for flag in [*mode.flags, *(f"config.{field}" for field in mode.fields)])
        lines += [f"  {'':<16}{part}" for part in textwrap.wrap(taken, 90, break_on_hyphens=False)]
    lines += ["", "Flags:"]
    lines += [f"  {f'--{name}={value}':<26}{meaning}" for name, (value, meaning) in FLAGS.items()]
    return "\n".join(lines)


def _listed(names: list[str], last: str) -> str:
    return f" {last} ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])
