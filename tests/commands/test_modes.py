"""Each mode accepts the flags that it uses and rejects all others by name; `--help` lists them."""

import pytest

from adaptive_span_jax.commands import modes
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from configs import base
from tests.support.program import run

OF_EACH = {
    "train": "seed data.path model.width span.limit generate.length",
    "evaluate": "evaluate.batch_size data.archive data.directory",
    "report": "data.archive data.directory",
    "generate": "generate.length generate.seed",
    "compress": "",
    "decompress": "",
    "export-weights": "",
    "verify": "",
    "prepare": "data.path data.archive data.directory",
    "plan": "seed data.path model.width train.batch_size",
    "profile": "seed data.path model.width train.batch_size",
    "doctor": "seed data.path model.width train.batch_size",
}
SOME = {field for fields in OF_EACH.values() for field in fields.split()}


@pytest.mark.parametrize("mode", OF_EACH)
def test_a_mode_takes_its_own_fields_and_no_others(mode):
    allowed = set(OF_EACH[mode].split())
    modes.reject_unused(mode, [], allowed)
    if modes.MODES[mode].fields != ("FIELD",):
        for field in SOME - allowed:
            with pytest.raises(UserError, match=f"--mode={mode} does not use --config.{field}: it accepts"):
                modes.reject_unused(mode, [], [field])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--mode=evaluate", "--config.model.width=64"],
            "--mode=evaluate does not use --config.model.width: it accepts only --config.evaluate.FIELD, "
            "--config.data.archive and --config.data.directory; the others are set by the checkpoint",
        ),
        (["--mode=evaluate", "--config.model.width=30"], "--mode=evaluate does not use --config.model.width"),
        (["--mode=verify", "--config.seed=5"], "--mode=verify does not use --config.seed: it accepts no fields"),
        (
            ["--mode=prepare", "--config.seed=5"],
            "--mode=prepare does not use --config.seed: it accepts only --config.data.FIELD",
        ),
        (
            ["--mode=generate", "--coordinator=a:1"],
            "does not use --coordinator, which is for --mode=train, evaluate, prepare, profile or doctor",
        ),
        (
            ["--mode=report", "--num_processes=2"],
            "does not use --num_processes, which is for --mode=train, evaluate, prepare, profile or doctor",
        ),
        (
            ["--mode=plan", "--process_id=0"],
            "--mode=plan does not use --process_id, which is for --mode=train, evaluate, prepare, profile or doctor",
        ),
        (
            ["--mode=verify", "--step=best"],
            "does not use --step, which is for --mode=evaluate, report, generate, compress, decompress, "
            "export-torch or export-weights",
        ),
        (["--mode=train", "--nosuch"], "'nosuch'"),
    ],
)
def test_what_a_mode_ignores_is_refused(arguments, expected, tmp_path):
    found = run(f"--workdir={tmp_path / 'run'}", *arguments)
    assert found.returncode == 2
    assert found.stderr.startswith("error: ")
    assert expected in found.stderr


def test_every_flag_of_the_table_is_a_flag_and_has_a_meaning():
    used = {flag for mode in modes.MODES.values() for flag in mode.flags}
    assert used == set(modes.FLAGS) - {"config", "config.FIELD", "workdir"}
    fields = Config.from_dict(base.get_config().to_dict())
    for mode in modes.MODES.values():
        for name in mode.fields:
            section, _, field = name.rpartition(".")
            assert field == "FIELD" or hasattr(getattr(fields, section), field)


@pytest.mark.parametrize("words", [["--help"], ["--mode=evaluate", "--help"], ["-h"]])
def test_help_is_short_and_says_what_each_mode_takes(words):
    found = run(*words)
    assert found.returncode == 0
    assert found.stderr == ""
    assert "python main.py --config=enwik8_large" in found.stdout
    lines = found.stdout.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 110
    assert "…" not in found.stdout
    for mode in modes.MODES:
        assert sum(line.startswith(f"  {mode} ") for line in lines) == 1
    for name, (value, meaning) in modes.FLAGS.items():
        assert sum(line.startswith(f"  --{name}={value}") and line.endswith(meaning) for line in lines) == 1
    after = lines[[line.split()[:1] for line in lines].index(["generate"]) + 1]
    assert after.split() == ["--prompt", "--prompt_file", "--step", "--config.generate.FIELD"]
