"""The command line, in a clone and installed: the program's name, its configs, and commands that users paste.

A clone is run by `python main.py` and has configs/ beside the package. An installed package is run by `adaptive-span`
and has configs/ inside (see pyproject.toml).
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
    """A command for a run, quoted for the shell; a run's own config.json is enough, so it stays short."""
    # The workdir may be relative to the current directory, which need not be the project's.
    main = "main.py" if Path.cwd() == _MAIN.parent else str(_MAIN)
    program = [PROGRAM] if _INSTALLED else ["python", main]
    named = [f"--{name}={value}" for name, value in flags.items()]
    return shlex.join([*program, f"--workdir={workdir}", *named])


def install_command(extra: str = "") -> str:
    """The command that installs this package's requirements, with those of an extra if one is named."""
    package = "adaptive_span_jax" if _INSTALLED else "."  # a clone installs itself, from the project's directory
    return f'pip install "{package}[{extra}]"' if extra else f"pip install {package}"


def config_names() -> list[str]:
    """The names of all configs that come with the program."""
    return sorted(path.stem for path in CONFIGS.glob("*.py"))


def config_file(value: str) -> str:
    """The file that --config=VALUE names: `text8_fixed:2048` becomes `…/configs/text8_fixed.py:2048`; files stay."""
    name, colon, argument = value.partition(":")
    # A known name comes before a file of that name: `enwik8` is also what the raw text is called.
    return f"{CONFIGS / name}.py{colon}{argument}" if name in config_names() else value


def make_configs_importable() -> None:
    """Lets config files write `from configs import base`, wherever the program was started.

    The directory itself is not put on sys.path: in an installed package its parent also has `data`, `model`, ….
    """
    if "configs" not in sys.modules:
        spec = ModuleSpec("configs", loader=None, is_package=True)
        spec.submodule_search_locations = [str(CONFIGS)]
        sys.modules["configs"] = importlib.util.module_from_spec(spec)
