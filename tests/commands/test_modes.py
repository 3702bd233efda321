"""Each mode takes the flags that it uses, refuses all others by name, and `--help` says which is which."""

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
    "verify": "",
    "prepare": "data.path data.archive data.directory",
    "plan": "seed data.path model.width train.batch_size",
    "doctor": "seed data.path model.width train.batch_size",
}
SOME = {field for fields in OF_EACH.values() for field in fields.split()}


@pytest.mark.parametrize("mode", OF_EACH)
def test_a_mode_takes_its_own_fields_and_no_others(mode):
    allowed = set(OF_EACH[mode].split())
    modes.refuse_unused(mode, [], allowed)
    if modes.MODES[mode].fields != ("FIELD",):
        for field in SOME - allowed:
            with pytest.raises(UserError, match=f"--config.{field} is not used by --mode={mode}, which takes"):
                modes.refuse_unused(mode, [], [field])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--mode=evaluate", "--config.model.width=64"],
            "--config.model.width is not used by --mode=evaluate, which takes only --config.evaluate.FIELD, "
            "--config.data.archive and --config.data.directory; all else is the checkpoint's own",
        ),
        (["--mode=evaluate", "--config.model.width=30"], "--config.model.width is not used by --mode=evaluate"),
        (["--mode=verify", "--config.seed=5"], "--config.seed is not used by --mode=verify, which takes none"),
        (["--mode=prepare", "--config.seed=5"], "not used by --mode=prepare, which takes only --config.data.FIELD"),
        (["--mode=generate", "--coordinator=a:1"], "--coordinator is for --mode=train, evaluate, prepare or doctor"),
        (["--mode=report", "--num_processes=2"], "--num_processes is for --mode=train, evaluate, prepare or doctor"),
        (["--mode=plan", "--process_id=0"], "--process_id is for --mode=train, evaluate, prepare or doctor, not for"),
        (
            ["--mode=verify", "--step=best"],
            "--step is for --mode=evaluate, report, generate, compress, decompress or export-torch",
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
