"""Adaptive attention span in JAX: train, evaluate, report, generate, compress, plan, profile, prepare data.

python main.py                           the quick start: two to five minutes, no download
python main.py --config=enwik8_large     an experiment of the paper
python main.py --config=bytes --config.data.path=FILE_OR_FOLDER    your own text
python main.py --workdir=runs/bytes      resume a run; --config is not needed
python main.py --workdir=runs/bytes --mode=generate --prompt='Once '    use its model

Every field of adaptive_span_jax/config.py can be set, e.g. --config.train.steps=100.
"""

import errno
import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from adaptive_span_jax import flag_errors
from adaptive_span_jax.commands import modes, verify
from adaptive_span_jax.config import Config, current_names
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import command_line, storage


def _text(name: str) -> str:
    return modes.FLAGS[name][1]


_CONFIG = config_flags.DEFINE_config_file("config", help_string=_text("config"))
_MODE = flags.DEFINE_enum("mode", "train", list(modes.MODES), "What to do.")
_WORKDIR = flags.DEFINE_string("workdir", None, _text("workdir"))
_STEP = flags.DEFINE_string("step", "latest", _text("step"))
_PROMPT = flags.DEFINE_string("prompt", None, _text("prompt"))
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, _text("prompt_file"))
_INPUT = flags.DEFINE_string("input", None, _text("input"))
_OUTPUT = flags.DEFINE_string("output", None, _text("output"))
_TOPOLOGY = flags.DEFINE_string("topology", None, _text("topology"))
_EXPECT_DEVICES = flags.DEFINE_integer("expect_devices", 0, _text("expect_devices"))
_COORDINATOR = flags.DEFINE_string("coordinator", None, _text("coordinator"))
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, _text("num_processes"))
_PROCESS_ID = flags.DEFINE_integer("process_id", None, _text("process_id"))
_OF_SOME_MODES = (
    *(_STEP, _PROMPT, _PROMPT_FILE, _INPUT, _OUTPUT, _TOPOLOGY, _EXPECT_DEVICES),
    *(_COORDINATOR, _NUM_PROCESSES, _PROCESS_ID),
)


def _main(started: float, argv: list[str]) -> int:
    """Validates the command line and runs the mode."""
    if len(argv) > 1:
        raise UserError(f"{argv[1]!r} is not a flag; flags start with --, see {command_line.PROGRAM} --help")
    file, _, argument = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    if not Path(file).is_file():
        there = ", ".join(command_line.config_names())
        raise UserError(f"--config={file}: neither a file nor a known config; the configs are {there}")
    changes = config_flags.get_override_values(flags.FLAGS["config"])
    modes.reject_unused(_MODE.value, [flag.name for flag in _OF_SOME_MODES if flag.present], changes)
    name = Path(file).stem + (f"_{argument}" if argument else "")
    directory = storage.place(_WORKDIR.value or f"runs/{name}")

    # Orbax reports every rename, and prints the traceback of an error that it raises; gcsfs reports every file.
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
    if _MODE.value == "verify":
        return verify.verify(directory)
    if _MODE.value == "import-torch":
        return _import_torch(directory, _CONFIG.value.to_dict() if _names_config(sys.argv) else None, changes)
    if _MODE.value in ("train", "prepare", "plan", "profile", "doctor"):
        own = _own_config(directory) if _WORKDIR.value and not _names_config(sys.argv) else None
        config = own.changed(changes) if own else Config.from_dict(_CONFIG.value.to_dict())
        return _start(config, directory.name if own else name, directory, started)
    return _use(directory, changes)


def _start(config: Config, name: str, directory: Path, started: float) -> int:
    """Modes that start from a config."""
    # Only now, with a valid config: importing JAX takes seconds.
    import jax

    from adaptive_span_jax.commands import doctor, plan
    from adaptive_span_jax.runtime import hosts

    if config.model.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if _MODE.value == "plan":  # before anything initializes this machine's devices
        if not _TOPOLOGY.value:
            raise UserError("--mode=plan needs --topology, e.g. --topology=v5e:2x4 or --topology=a100:8")
        return plan.plan(config, _TOPOLOGY.value, name)
    _join(config.train.batch_size)
    with hosts.multihost_errors():
        if _MODE.value == "doctor":
            return doctor.doctor(config, directory, _EXPECT_DEVICES.value)
        # Imported after the doctor, which must leave no files: importing matplotlib creates folders in the user's home.
        from adaptive_span_jax.commands import prepare, profile, train

        match _MODE.value:
            case "prepare":
                return prepare.prepare(config.data)
            case "profile":
                return profile.profile(config, directory)
            case _:
                doctor.quick(_EXPECT_DEVICES.value)
                several = jax.process_count() > 1
                resume = "the same command again, on every host" if several else command_line.command(directory)
                return train.train(config, directory, resume, started)


def _import_torch(directory: Path, fields: dict[str, Any] | None, changes: dict[str, Any]) -> int:
    """Creates a run, whose config is derived from the PyTorch file."""
    from adaptive_span_jax.commands import import_torch

    return import_torch.import_torch(_named_file(_INPUT), directory, fields, changes)


def _named_file(flag: flags.FlagHolder[str | None]) -> Path:
    if flag.value is None:
        raise UserError(f"--mode={_MODE.value} needs --{flag.name}=FILE")
    return Path(flag.value)


def _use(directory: Path, changes: dict[str, Any]) -> int:
    """Modes that read a run's checkpoint: its own config is used, with the command line's changes."""
    import jax

    from adaptive_span_jax.commands import (
        compress,
        decompress,
        evaluate,
        export_torch,
        export_weights,
        generate,
        report,
    )
    from adaptive_span_jax.runtime import hosts

    if _computes_in_float64(directory):
        jax.config.update("jax_enable_x64", True)
    # The run's own evaluate.batch_size is known only after loading. A wrong guess affects only speed.
    _join(_CONFIG.value.evaluate.batch_size)
    with hosts.multihost_errors():
        match _MODE.value:
            case "evaluate" if _INPUT.value is not None:
                return evaluate.evaluate_file(directory, _STEP.value, Path(_INPUT.value))
            case "evaluate":
                return evaluate.evaluate(directory, _STEP.value, changes)
            case "report":
                return report.report(directory, _STEP.value, changes)
            case "generate":
                return generate.generate(directory, _STEP.value, _PROMPT.value, _PROMPT_FILE.value, changes)
            case "export-weights":
                return export_weights.export_weights(directory, _STEP.value, _named_file(_OUTPUT))
            case "export-torch":
                return export_torch.export_torch(_named_file(_OUTPUT), directory, _STEP.value)
            case _:
                run = compress.compress if _MODE.value == "compress" else decompress.decompress
                return run(directory, _STEP.value, _named_file(_INPUT), Path(_OUTPUT.value) if _OUTPUT.value else None)


def _join(streams: int) -> None:
    """Sets up JAX: compilation cache, other hosts (in the modes that support them), CPU devices."""
    from adaptive_span_jax.runtime import cpu, hosts, user_cache

    user_cache.keep_compiled()
    if _COORDINATOR.name in modes.MODES[_MODE.value].flags:
        hosts.connect(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    cpu.use_cores(streams)


def _own_config(directory: Path) -> Config | None:
    """The config in a run's `config.json`; None if there is none."""
    file = directory / "config.json"
    try:
        return Config.from_dict(current_names(json.loads(file.read_text(encoding="utf-8"))))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (UserError, ValueError, IsADirectoryError, PermissionError) as error:  # ValueError: not JSON, or not text
        reason = str(error).partition(";")[0]
        raise UserError(f"{file} is invalid ({reason}); pass the run's config with --config=FILE") from error


def _computes_in_float64(directory: Path) -> bool:
    """Whether `config.json` has float64. An invalid file is ignored here, because the checkpoint has its own config."""
    try:
        own = _own_config(directory)
    except UserError:
        return False
    return own is not None and own.model.compute_dtype == "float64"


def _names_config(words: Sequence[str]) -> bool:
    return any(word.startswith(("--config=", "-config=")) or word in ("--config", "-config") for word in words)


def _with_config_files(words: Sequence[str]) -> list[str]:
    """The command line with config names replaced by file paths, because the flag library accepts only files."""
    found = list(words)
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--config", "-config") and equals:
            found[index] = f"{flag}={command_line.config_file(value)}"
        elif flag in ("--config", "-config") and index + 1 < len(words):
            found[index + 1] = command_line.config_file(words[index + 1])
    return found


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags; any error becomes a UserError that names the flag."""
    if not {"--help", "-help", "-h", "-?"}.isdisjoint(argv):
        print(f"{(__doc__ or '').replace('python main.py', command_line.PROGRAM)}\n{modes.usage()}")
        sys.exit(0)
    if not _names_config(argv):
        argv = [argv[0], "--config=quickstart", *argv[1:]]
    command_line.make_configs_importable()
    argv = _with_config_files(argv)
    try:
        return flags.FLAGS(argv)
    except Exception as error:  # a config file is a Python program and may raise anything
        raise UserError(flag_errors.explain(argv, error)) from error


def main() -> None:
    """The entry point: parses the command line, runs the mode, exits with its code."""
    os.environ |= storage.ENVIRONMENT
    try:
        app.run(functools.partial(_main, time.perf_counter()), flags_parser=_parse)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(
            f"error: the disk is full ({error}); saved checkpoints are safe. "
            "Free some space and run the same command again",
            file=sys.stderr,
        )
        sys.exit(2)
    except Exception as error:
        if not storage.is_failure(error):
            raise
        print(
            f"error: the object storage request failed ({str(error).strip() or repr(error)}); "
            "saved checkpoints are safe. Run the same command again",
            file=sys.stderr,
        )
        sys.exit(1)  # not 2, which tells schedulers not to retry
    except KeyboardInterrupt:
        print("Stopped; nothing to save.", file=sys.stderr)
        sys.exit(130)
