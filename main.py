"""Adaptive attention span in JAX: train, evaluate, report, generate, compress; plan a run; prepare data.

    python main.py                                     the quickstart: four minutes in all, no download
    python main.py --config=configs/enwik8_large.py    an experiment of the paper
    python main.py --config=configs/bytes.py --config.data.path=FILE_OR_FOLDER    your own text

The same command again goes on where it stopped. Every field of configs/base.py can be set: --config.train.steps=100.
"""

import errno
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from adaptive_span_jax import flag_errors, storage, verify
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError

_HERE = Path(__file__).parent
_CONFIG = config_flags.DEFINE_config_file(
    "config",
    help_string="The run: a file of configs/, some with an argument (file.py:2048); quickstart.py unless given.",
)
_MODES = ["train", "evaluate", "report", "generate", "compress", "decompress", "verify", "prepare", "plan", "doctor"]
_MODE = flags.DEFINE_enum("mode", "train", _MODES, "What to do.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept; runs/<config name> unless given.")
_STEP = flags.DEFINE_string("step", "latest", "evaluate, generate, …: the checkpoint: latest, best or a step.")
_PROMPT = flags.DEFINE_string("prompt", None, "generate: the text to go on from.")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "generate: a file with the text to go on from.")
_INPUT = flags.DEFINE_string("input", None, "compress, decompress: the file to read.")
_OUTPUT = flags.DEFINE_string("output", None, "compress, decompress: the file to write.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "plan: the machine, e.g. v5e:2x4, a100:8 or h100:2x8.")
_EXPECT_DEVICES = flags.DEFINE_integer("expect_devices", 0, "train, doctor: refuse another number of devices; 0: any.")
_OF_MODES = (
    (_STEP, ("evaluate", "report", "generate", "compress", "decompress")),
    (_PROMPT, ("generate",)),
    (_PROMPT_FILE, ("generate",)),
    (_INPUT, ("compress", "decompress")),
    (_OUTPUT, ("compress", "decompress")),
    (_TOPOLOGY, ("plan",)),
    (_EXPECT_DEVICES, ("train", "doctor")),
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "Several hosts, unless Cloud TPU, Slurm or Open MPI say it: HOST:PORT of process 0 …"
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "… how many processes there are …")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "… and which of them this is, from 0.")


def main(argv: list[str]) -> int:
    """Checks the command line, then hands over to the mode's own file."""
    if len(argv) > 1:
        raise UserError(f"{argv[1]!r} is not an option; options start with --, see python main.py --help")
    file, _, argument = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    config = _read_config(file)
    name = Path(file).stem + (f"_{argument}" if argument else "")
    directory = storage.place(_WORKDIR.value or f"runs/{name}")
    command = " ".join(["python", *(word for word in sys.argv if not word.startswith("--mode"))])

    for flag, modes in _OF_MODES:
        if flag.present and _MODE.value not in modes:
            raise UserError(f"--{flag.name} is for --mode={' or '.join(modes)}, not for {_MODE.value}")
    # Orbax reports every rename, and prints the traceback of an error that it raises; gcsfs reports every file.
    logging.set_verbosity(logging.WARNING)
    logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
    if _MODE.value == "verify":
        return verify.verify(directory, command)
    return _run(config, name, directory, command)


def _run(config: Config, name: str, directory: Path, command: str) -> int:
    # Only now, with a valid config: importing JAX takes seconds.
    import jax

    from adaptive_span_jax import cpu, doctor, hosts, plan, user_cache

    if config.model.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if _MODE.value == "plan":  # before anything asks for this machine's own devices
        if not _TOPOLOGY.value:
            raise UserError("--mode=plan needs --topology, e.g. --topology=v5e:2x4 or --topology=a100:8")
        return plan.plan(config, _TOPOLOGY.value, name)
    user_cache.keep_compiled()
    if _MODE.value in ("train", "evaluate", "prepare", "doctor"):
        hosts.connect(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
    cpu.use_cores(config.train.batch_size)
    with hosts.together():
        if _MODE.value == "doctor":
            return doctor.doctor(config, directory, _EXPECT_DEVICES.value)
        # Not for the doctor, who leaves nothing behind: importing matplotlib makes folders in the user's home.
        from adaptive_span_jax import compress, evaluate, generate, prepare, report, train

        match _MODE.value:
            case "prepare":
                return prepare.prepare(config.data)
            case "evaluate":
                return evaluate.evaluate(config, directory, _STEP.value)
            case "report":
                return report.report(directory, _STEP.value)
            case "generate":
                return generate.generate(config.generate, directory, _STEP.value, _PROMPT.value, _PROMPT_FILE.value)
            case "compress" | "decompress":
                if _INPUT.value is None:
                    raise UserError(f"--mode={_MODE.value} needs --input=FILE")
                run = compress.compress if _MODE.value == "compress" else compress.decompress
                return run(directory, _STEP.value, Path(_INPUT.value), Path(_OUTPUT.value) if _OUTPUT.value else None)
            case _:
                doctor.quick(_EXPECT_DEVICES.value)
                return train.train(config, directory, command)


def _read_config(file: str) -> Config:
    if not Path(file).is_file():
        there = ", ".join(sorted(path.name for path in (_HERE / "configs").glob("*.py")))
        raise UserError(f"--config={file}: no such file; configs/ has {there}")
    return Config.from_dict(_CONFIG.value.to_dict())


def _parse(argv: list[str]) -> list[str]:
    """Reads the flags; whatever is wrong with them becomes a UserError that names the flag."""
    if not any(word.startswith(("--config=", "-config=")) or word in ("--config", "-config") for word in argv):
        argv = [argv[0], f"--config={_HERE / 'configs' / 'quickstart.py'}", *argv[1:]]
    try:
        return flags.FLAGS(argv)
    except Exception as error:  # a config file is a program, and may raise anything
        raise UserError(flag_errors.explain(argv, error)) from error


if __name__ == "__main__":
    try:
        app.run(main, flags_parser=_parse)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(
            f"error: the disk is full ({error}); what was reported as saved is safe. "
            "Make room and start the same command again",
            file=sys.stderr,
        )
        sys.exit(2)
    except Exception as error:
        if not storage.is_failure(error):
            raise
        print(
            f"error: the bucket does not answer as it should ({str(error).strip() or repr(error)}); "
            "what was reported as saved is safe. Start the same command again",
            file=sys.stderr,
        )
        sys.exit(1)  # not 2, which tells schedulers that no second try would help
    except KeyboardInterrupt:
        print("Stopped; nothing to save.", file=sys.stderr)
        sys.exit(130)
