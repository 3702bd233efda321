"""Printed commands are short and correctly quoted for the shell."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from adaptive_span_jax.report import result
from adaptive_span_jax.runtime import command_line
from tests.conftest import tiny_config, tiny_fields

ROOT = Path(__file__).parents[2]
ODD = "a b&c\"'$(touch oops);*"  # all that an unquoted command would trip over

RESULT = {
    "unit": "byte",
    **dict.fromkeys(("dev_bits", "test_bits", "order2_bits", "average_span"), 2.0),
    **dict.fromkeys(("shortest_span", "longest_span", "flops_per_token", "seconds"), 3.0),
    **dict.fromkeys(("dev_tokens", "test_tokens", "steps"), 4),
}


def run_main(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "main.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def flattened(fields: ConfigDict, section: str = "") -> list[tuple[str, object]]:
    """All fields by their full names."""
    found = []
    for name, value in fields.items():
        full = f"{section}{name}"
        found += flattened(value, f"{full}.") if isinstance(value, ConfigDict) else [(full, value)]
    return found


def words(line: str) -> list[str]:
    """What the shell passes to the program of a printed command."""
    found = subprocess.run(["bash", "-c", f"python() {{ printf '%s\\0' \"$@\"; }}; {line}"], capture_output=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.decode().split("\0")[:-1]


def printed_commands(text: str) -> dict[str, str]:
    """The commands of a printed block, by their names."""
    lines = [line.strip().partition("  ") for line in text.splitlines() if "  python " in line or "  open " in line]
    return {name: value.strip() for name, _, value in lines}


def test_the_shell_reads_a_command_as_it_was_meant(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (
        command_line.command(Path("runs/small"), mode="report") == "python main.py --workdir=runs/small --mode=report"
    )
    line = command_line.command(Path(ODD), mode="decompress", input=f"{ODD}.adspan")
    assert words(line) == ["main.py", f"--workdir={ODD}", "--mode=decompress", f"--input={ODD}.adspan"]


def test_elsewhere_the_program_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = words(command_line.command(Path("run")))[0]
    assert Path(program).samefile(ROOT / "main.py")


def test_what_to_do_next_survives_the_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    directory = tmp_path / ODD
    result.show_result(directory, RESULT)
    found = printed_commands(capsys.readouterr().out)
    assert words(found["report"]) == ["main.py", f"--workdir={directory}", "--mode=report"]
    assert words(found["evaluate again"]) == ["main.py", f"--workdir={directory}", "--mode=evaluate"]
    assert words(found["train longer"]) == ["main.py", f"--workdir={directory}", "--config.train.steps=8"]
    (directory / "report").mkdir(parents=True)
    (directory / "report" / "index.html").touch()
    result.show_result(directory, RESULT)
    opened = printed_commands(capsys.readouterr().out)["report"]
    assert shlex.split(opened) == ["open", str(directory / "report" / "index.html")]


def write_config(workdir: Path, **fields: dict) -> dict:
    """What a run of a missing text leaves behind."""
    workdir.mkdir()
    config = json.loads(tiny_config(data={"source": "files", "path": "/no/such"}, **fields).to_json())
    (workdir / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "config.data.path is '/no/such', which does not exist"),
        (["--config.data.path=/nor/this"], "config.data.path is '/nor/this', which does not exist"),
        # Together they are valid, one by one they are not.
        (["--config.model.width=25", "--config.model.heads=5"], "config.data.path is '/no/such', which does not exist"),
        (
            ["--config.model.width=25"],
            "config.model.width is 25; it must be a multiple of config.model.heads, which is 2",
        ),
        (
            ["--config=configs/bytes.py", "--config.data.path=/other"],
            "config.data.path is '/other', which does not exist",
        ),
    ],
)
def test_a_runs_own_config_is_used_unless_another_is_named(arguments, expected, tmp_path):
    workdir = tmp_path / ODD
    write_config(workdir)
    found = run_main(f"--workdir={workdir}", *arguments)
    assert found.returncode == 2
    assert expected in found.stderr, found.stderr


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda config: "{", "Expecting property name"),
        (lambda config: "[]", "config is []"),
        (lambda config: json.dumps(config | {"seed": -1}), "config.seed is -1"),
        (lambda config: json.dumps({k: v for k, v in config.items() if k != "seed"}), "config.seed is missing"),
        (lambda config: json.dumps(config | {"new": 1}), "config.new is not a known field"),
        (lambda config: "\udcff", "'utf-8' codec can't decode byte"),
    ],
)
def test_a_config_json_that_cannot_be_used_is_named(change, expected, tmp_path):
    workdir = tmp_path / "run"
    file, config = workdir / "config.json", write_config(workdir)
    file.write_text(change(config), errors="surrogateescape")
    found = run_main(f"--workdir={workdir}")
    assert found.returncode == 2
    assert found.stderr.startswith(f"error: {file} is invalid ({expected}")
    assert found.stderr.endswith("; pass the run's config with --config=FILE\n")


def test_with_a_config_named_a_damaged_config_json_does_not_matter(tmp_path):
    (tmp_path / "config.json").write_text("{")
    found = run_main(f"--workdir={tmp_path}", "--config=configs/bytes.py", "--config.data.path=/other")
    assert "config.data.path is '/other', which does not exist" in found.stderr


@pytest.mark.slow
def test_printed_commands_can_be_pasted(tmp_path):
    """A run in a directory of an odd name: each printed command is given to the shell as it is."""
    workdir = tmp_path / ODD
    fields = tiny_fields(train={"steps": 4}, generate={"length": 7})
    changes = [f"--config.{name}={value}" for name, value in flattened(fields)]
    first = run_main(f"--workdir={workdir}", *changes)
    assert first.returncode == 0, first.stderr
    commands = printed_commands(first.stdout)

    def paste(command: str) -> str:
        line = command.replace("python ", f"{shlex.quote(sys.executable)} ", 1)
        found = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stderr
        return found.stdout

    assert f"Evaluation of {workdir}, step 4" in paste(commands["evaluate again"])
    longer = paste(commands["train longer"])
    assert "changed since the last checkpoint: config.train.steps: 4 → 8" in longer
    assert "config.model" not in longer
    resume = command_line.command(workdir)
    assert f"This run is complete: {workdir} has step 8" in paste(resume)
    assert "7 after a prompt of 4" in paste(command_line.command(workdir, mode="generate", prompt="def "))
    text = tmp_path / "a text"
    text.write_bytes(b"def main():")
    packed = paste(command_line.command(workdir, mode="compress", input=text))
    text.unlink()
    paste(printed_commands(packed)["restore it"])
    assert text.read_bytes() == b"def main():"
    assert "step 8" in paste(command_line.command(workdir, mode="verify"))
    assert not (ROOT / "oops").exists()
