"""The command line: good and bad input as a user types it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "main.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--config.train.batchsize=8", 'Did you mean "batch_size"'),
        ("--config.trian.steps=8", 'Did you mean "train"'),
        ("--config.train.batch_size=eight", "--config.train.batch_size=eight"),
        ("--config=configs/nowhere.py", "configs/ has base.py"),
        ("--config=configs/text8_fixed.py:long", "text8_fixed.py:long"),
        ("--mode=fly", "<train|evaluate"),
        ("--speed=9", "'speed'"),
        ("--prompt=a", "--prompt is for --mode=generate, not for train"),
        ("--workdir=s3://bucket/run", "s3://bucket/run is no place for a run"),
        ("--workdir=gs:///run", "gs:///run is no place for a run"),
        ("--mode=plan", "--mode=plan needs --topology"),
        ("train", "'train' is not an option"),
        ("--config.model.width=131", "config.model.width is 131; it must be a multiple of config.model.heads"),
        ("--config.train.segment=0", "config.train.segment is 0; it must be between 1 and"),
        ("--config.span.limit=-3", "config.span.limit is -3; it must be between 1 and"),
        ("--config.data.source=web", "config.data.source is 'web'; it must be one of"),
        ("--config.model.dropout=1.5", "config.model.dropout is 1.5; it must be"),
    ],
)
def test_bad_input_gets_one_clear_message(argument, expected, tmp_path):
    workdir = tmp_path / "run"
    found = run(f"--workdir={workdir}", argument)
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert expected in found.stderr
    assert "Traceback" not in found.stderr
    assert not workdir.exists()


def test_missing_data_is_named(tmp_path):
    found = run("--config=configs/bytes.py", "--config.data.path=/no/such/file", f"--workdir={tmp_path / 'run'}")
    assert found.returncode == 2
    assert "/no/such/file" in found.stderr
    assert "Traceback" not in found.stderr


def test_help_is_short_and_useful():
    found = run("--help")
    assert "python main.py --config=configs/enwik8_large.py" in found.stdout
    assert "--workdir" in found.stdout
    assert len(found.stdout.splitlines()) < 40


@pytest.mark.slow
def test_quickstart_in_small(tmp_path):
    arguments = ("--config.train.steps=30", "--config.data.max_bytes=200000", f"--workdir={tmp_path / 'run'}")
    first = run(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert "Result" in first.stdout
    again = run(*arguments)
    assert "This run is complete" in again.stdout
