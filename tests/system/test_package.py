"""The installed package: a wheel in its own environment, used outside the clone."""

import dataclasses
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.program import ROOT

pytest.importorskip("hatchling", reason="needs hatchling: pip install -r requirements-dev.txt")
pytestmark = pytest.mark.xdist_group("package")  # one wheel serves all

TINY = [
    *("--config.train.steps=2", "--config.train.batch_size=2", "--config.train.segment=16", "--config.span.limit=32"),
    *("--config.model.layers=1", "--config.model.width=8", "--config.model.heads=2", "--config.model.feedforward=8"),
    *("--config.data.max_bytes=40000", "--config.evaluate.max_tokens=200"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel"]
    # Offline: the build tool is that of the development environment.
    command = [*pip, "--no-deps", "--no-index", "--no-build-isolation", f"--wheel-dir={target}", str(ROOT)]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    [file] = target.glob("*.whl")
    return file


@dataclasses.dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty directory to use it in."""

    environment: Path
    directory: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [str(self.environment / "bin" / program), *arguments]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd=self.directory, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False, symlinks=True)
    # The libraries that the package needs are those of the development environment: installing them takes minutes.
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", f"--python={environment / 'bin' / 'python'}"]
    found = subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return Installed(environment, tmp_path_factory.mktemp("elsewhere"))


def test_a_wheel_has_the_package_and_its_configs_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "adaptive_span_jax").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    expected = {str(path.relative_to(ROOT)) for path in files}
    expected |= {f"adaptive_span_jax/configs/{path.name}" for path in (ROOT / "configs").glob("*.py")}
    assert names == expected
    assert {"adaptive_span_jax/py.typed", "adaptive_span_jax/planning/trained_spans.json"} <= names


def test_help_names_the_installed_command(installed):
    found = installed.run("adaptive-span", "--help")
    assert found.returncode == 0, found.stderr
    assert "adaptive-span --config=enwik8_large" in found.stdout
    assert "main.py" not in found.stdout


def test_an_unknown_config_is_refused_with_the_names_of_all(installed):
    found = installed.run("adaptive-span", "--config=nonsense")
    assert found.returncode == 2
    names = ", ".join(sorted(path.stem for path in (ROOT / "configs").glob("*.py")))
    assert found.stderr == f"error: --config=nonsense: neither a file nor a known config; the configs are {names}\n"


def test_errors_name_extras(installed):
    code = "from adaptive_span_jax.runtime import command_line as c; print(c.install_command('torch'))"
    assert installed.run("python", "-c", code).stdout == 'pip install "adaptive_span_jax[torch]"\n'


@pytest.mark.slow
def test_a_config_by_name_trains_and_says_what_comes_next(installed):
    found = installed.run("adaptive-span", "--config=quickstart", *TINY)
    assert found.returncode == 0, found.stderr
    assert (installed.directory / "runs" / "quickstart" / "result.json").is_file()
    assert "adaptive-span --workdir=runs/quickstart --mode=evaluate" in found.stdout
    assert "main.py" not in found.stdout


def test_configs_with_arguments_and_of_ones_own(installed):
    """A config of one's own starts from those of the package, as they start from each other."""
    refused = "config.model.width is 7; it must be a multiple of"
    (installed.directory / "mine.py").write_text("from configs import base\n\nget_config = base.get_config\n")
    for value in ("text8_dynamic:512", "mine.py"):
        found = installed.run("adaptive-span", "--config", value, "--config.model.width=7")
        assert found.returncode == 2
        assert refused in found.stderr
