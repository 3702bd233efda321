"""The program's name, its configs and printed commands, in a clone and in an installed package.

A clone is started with `python main.py` and has configs/ beside the package. An installed package is started with
`adaptive-span` and has configs/ inside (see pyproject.toml).
"""

import importlib.util
import shlex
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = (_PACKAGE / "configs").is_dir()
_MAIN = _PACKAGE.parent / "main.py"

PROGRAM = "adaptive-span" if _INSTALLED else "python main.py"
CONFIGS = (_PACKAGE if _INSTALLED else _PACKAGE.parent) / "configs"


def command(workdir: Path, **flags: object) -> str:
    """A command for a run, quoted for the shell. It needs no --config, because the run has its config.json."""
    # The workdir may be relative to the current directory, which may not be the project's.
    main = "main.py" if Path.cwd() == _MAIN.parent else str(_MAIN)
    program = [PROGRAM] if _INSTALLED else ["python", main]
    named = [f"--{name}={value}" for name, value in flags.items()]
    return shlex.join([*program, f"--workdir={workdir}", *named])


def install_command(extra: str = "") -> str:
    """The command that installs this package's requirements, with those of an extra if one is named."""
    package = "adaptive_span_jax" if _INSTALLED else "."  # in a clone, to be run in the project's directory
    return f'pip install "{package}[{extra}]"' if extra else f"pip install {package}"


def config_names() -> list[str]:
    """The names of all bundled configs."""
    return sorted(path.stem for path in CONFIGS.glob("*.py"))


def config_file(value: str) -> str:
    """The file for --config=VALUE: `text8_fixed:2048` becomes `…/configs/text8_fixed.py:2048`; a file is unchanged."""
    name, colon, argument = value.partition(":")
    # A config takes precedence over a file of the same name: the raw text is also called `enwik8`.
    return f"{CONFIGS / name}.py{colon}{argument}" if name in config_names() else value


def make_configs_importable() -> None:
    """Makes `from configs import base` work in config files, whatever the current directory.

    Its parent is not put on sys.path: in an installed package that also contains `data`, `model`, ….
    """
    if "configs" not in sys.modules:
        spec = ModuleSpec("configs", loader=None, is_package=True)
        spec.submodule_search_locations = [str(CONFIGS)]
        sys.modules["configs"] = importlib.util.module_from_spec(spec)
