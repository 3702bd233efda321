"""The command line: valid and invalid input as a user types it."""

import json

import pytest

from tests.support.program import run


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--config.train.batchsize=8", "config.train.batchsize is not a known field. Did you mean batch_size?"),
        ("--config.trian.steps=8", "config.trian is not a known field. Did you mean train?"),
        ("--config.train.zzz=8", "config.train.zzz is not a known field. config.train has batch_size, "),
        ("--config.seed.start=8", "config.seed has no fields"),
        ("--config.train=8", "config.train is a group of fields; set one of them: config.train.batch_size"),
        ("--config.train.batch_size=eight", "config.train.batch_size is 'eight'; it must be a whole number"),
        ("--config.train.steps=2.5", "config.train.steps is '2.5'; it must be a whole number"),
        ("--config.train.clip=much", "config.train.clip is 'much'; it must be a number"),
        ("--config.model.remat=maybe", "config.model.remat is 'maybe'; it must be True or False"),
        ("--config.data.splits=(0.9,0.1)", "config.data.splits is (0.9, 0.1); it must be a tuple of 3 numbers"),
        ("--config=configs/nowhere.py", "neither a file nor a known config; the configs are base, bytes, "),
        ("--config=nonsense", "the configs are base, bytes, "),
        ("--config=text8_fixed:long", "text8_fixed.py does not accept the argument 'long'"),
        ("--config=configs/text8_fixed.py:long", "configs/text8_fixed.py does not accept the argument 'long'"),
        ("--config=configs/enwik8.py:2048", "configs/enwik8.py does not accept the argument '2048'"),
        ("--config=configs/text8_fixed.py:", "configs/text8_fixed.py: has no argument after the colon; add one"),
        ("--mode=fly", "<train|evaluate"),
        ("--speed=9", "'speed'"),
        ("--prompt=a", "--mode=train does not use --prompt, which is for --mode=generate"),
        ("--workdir=s3://bucket/run", "s3://bucket/run is not a valid workdir"),
        ("--workdir=gs:///run", "gs:///run is not a valid workdir"),
        ("--mode=plan", "--mode=plan needs --topology"),
        ("train", "'train' is not a flag"),
        ("--config.model.width=131", "config.model.width is 131; it must be a multiple of config.model.heads"),
        ("--config.train.segment=0", "config.train.segment is 0; it must be between 1 and"),
        ("--config.span.limit=-3", "config.span.limit is -3; it must be between 1 and"),
        ("--config.data.source=web", "config.data.source is 'web'; it must be one of"),
        ("--config.span.limit=9999999", "config.span.limit is 9999999; it must be between 1 and"),
        ("--config.train.segment=9999999", "config.train.segment is 9999999; it must be between 1 and"),
        ("--config.train.learning_rate=nan", "config.train.learning_rate is nan; it must be above 0"),
        ("--config.train.learning_rate=inf", "config.train.learning_rate is inf; it must be above 0"),
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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("def get_config(:", "line 1 of FILE is a syntax error (invalid syntax)"),
        ("import notthere", "FILE raised ModuleNotFoundError: No module named 'notthere'"),
        ("raise ValueError('boom')", "FILE raised ValueError: boom"),
        ("x = 1", "FILE has no function get_config"),
    ],
)
def test_a_config_that_is_no_config_is_named(content, expected, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(content)
    found = run(f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert found.returncode == 2
    assert found.stderr.startswith(f"error: --config={file}: ")
    assert expected.replace("FILE", str(file)) in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (
            ["--config=configs/bytes.py", "--config.data.path=/no/such"],
            {},
            "config.data.path is '/no/such', which does not exist",
        ),
        (
            ["--config.train.batch_size=3"],
            {"JAX_NUM_CPU_DEVICES": "2"},
            "config.train.batch_size is 3, which cannot be split evenly over 2 devices",
        ),
        (
            ["--config.train.batch_size=4"],
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
            "config.train.batch_size is 4, which cannot be split evenly over 8 devices",
        ),
        (["--config.train.segment=500000"], {}, "but it needs two segments of 500000 (config.train.segment)"),
        (["--workdir=FILE/run"], {}, "FILE/run is not writable (Not a directory); use another"),
    ],
)
def test_what_only_a_start_can_find_out_is_named_as_clearly(arguments, environment, expected, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = run(f"--workdir={tmp_path / 'run'}", *(word.replace("FILE", str(file)) for word in arguments))
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert expected.replace("FILE", str(file)) in found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == ""


@pytest.mark.slow
def test_quickstart_in_small(tmp_path):
    arguments = (
        *("--config.train.steps=30", "--config.log.every_steps=5", "--config.data.max_bytes=200000"),
        f"--workdir={tmp_path / 'run'}",
    )
    first = run(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    assert "Result" in first.stdout
    kept = list((tmp_path / "cache" / "adaptive_span_jax" / "jax").glob("*train_step*"))
    assert kept, "a second start would compile again"
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert 0 < summary["input_share"] < 0.01, "devices wait for text"
    again = run(*arguments)
    assert "This run is complete" in again.stdout
    own = run("--mode=evaluate", *arguments[-1:])  # the checkpoint says the rest
    assert own.returncode == 0, own.stderr
    assert "test, exact" in own.stdout


def test_preparing_own_text_shows_it(tmp_path):
    (tmp_path / "text").write_bytes(b"abcde" * 200)
    found = run("--mode=prepare", "--config=configs/bytes.py", f"--config.data.path={tmp_path / 'text'}")
    assert found.returncode == 0, found.stderr
    assert "train 900, dev 50, test 50" in found.stdout
    assert "5 symbols" in found.stdout
    assert str(tmp_path / "text") in found.stdout
