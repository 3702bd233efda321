"""`--mode=profile`: a trace, a table of operations, and a run that is only read."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
from numpy.testing import assert_allclose

from adaptive_span_jax.commands import profile, train
from adaptive_span_jax.errors import UserError
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device", "no_report")

QUICK: dict[str, Any] = {"attention": "plain", "layers": 1}  # to compile


def contents(workdir: Path) -> dict[str, bytes]:
    """All files but those of the profile."""
    files = {str(path.relative_to(workdir)): path for path in workdir.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith("profile/")}


def test_a_new_workdir_gets_a_trace_and_a_table_and_nothing_else(tmp_path, capsys):
    assert profile.profile(tiny_config(), tmp_path / "run") == 0
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["profile"]
    folder = tmp_path / "run" / "profile"
    [session] = (folder / "plugins" / "profile").iterdir()
    assert {"".join(path.suffixes[-2:]) for path in session.iterdir()} >= {".xplane.pb", ".json.gz"}

    with (folder / "operations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["operation", "count", "total_ms", "share", "source"]
    assert len({row["operation"] for row in rows}) == len(rows) > 20
    times = [float(row["total_ms"]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert_allclose(sum(float(row["share"]) for row in rows), 1, atol=1e-3)
    # What a step does once was traced once a step, without the steps before the trace; a layer's, once a layer.
    counts = [int(row["count"]) for row in rows]
    assert all(count % profile.STEPS == 0 for count in counts)
    assert {profile.STEPS, profile.STEPS * tiny_config().model.layers} <= set(counts)
    assert any(row["source"].endswith("dot_general") for row in rows)

    printed = capsys.readouterr().out
    assert f"{folder}, session {session.name}" in printed
    assert f"Profile of {profile.STEPS} steps after step {profile.WARM_UP_STEPS}" in printed
    for row in rows[:15]:
        assert re.search(rf"^  {re.escape(row['operation'])} +{row['count']} +[\d.,]+ ms +[\d.]+ % ", printed, re.M)


def test_a_run_is_profiled_from_its_newest_checkpoint_and_left_as_it_is(tmp_path, capsys):
    config = tiny_config(train={"steps": 4}, model=QUICK, checkpoint={"every_steps": 2, "keep": 5})
    assert train.train(config, tmp_path, "command") == 0
    before = contents(tmp_path)
    assert profile.profile(config, tmp_path) == 0
    assert "steps after step 6\n" in capsys.readouterr().out
    assert contents(tmp_path) == before

    with pytest.raises(UserError, match=r"config\.model\.width: 22 → 24"):
        profile.profile(tiny_config(train={"steps": 4}, model=QUICK | {"width": 24}), tmp_path)

    # A damaged checkpoint and an unfinished one are for the next training run to deal with.
    newest = tmp_path / "checkpoints" / "4"
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
    (tmp_path / "checkpoints" / "9.unfinished").mkdir()
    before = contents(tmp_path)
    assert profile.profile(config, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "the checkpoint of step 4 is damaged" in printed
    assert "steps after step 4\n" in printed  # step 2, and two steps before the trace
    assert contents(tmp_path) == before
    assert (tmp_path / "checkpoints" / "9.unfinished").is_dir()


def test_an_unwritable_workdir_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"--workdir=.*file/run is not writable"):
        profile.profile(tiny_config(), tmp_path / "file" / "run")
