"""Checkpoints: their content, reading them with other libraries and on other devices, and failed saves."""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import subprocess
import sys
import threading
from typing import Any

import flax
import jax
import numpy as np
import optax
import orbax.checkpoint
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import adaptive_span_jax
from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.commands import train
from adaptive_span_jax.data.segments import Position
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import TrainState, abstract_state, create_state, restore_state, to_trees
from tests.conftest import tiny_config
from tests.support.checkpoints import ABOUT, VOCABULARY, make_state, names, one_device_mesh, save
from tests.support.training import run_steps

TEXT = np.random.default_rng(2).integers(0, VOCABULARY, 1500).astype(np.uint8)


@pytest.fixture(scope="module")
def state() -> TrainState:
    return make_state()


def flip(path, place=-1):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# Somebody else's program: orbax for all arrays, TensorStore alone for one, JSON for the rest.
READER = """
import json, sys, warnings
import numpy, tensorstore
from orbax.checkpoint import v1 as ocp

folder = sys.argv[1]
warnings.simplefilter("ignore")
found = ocp.load_checkpointables(folder)
kvstore = {"driver": "ocdbt", "base": f"file://{folder}/params/", "path": "layers.attention.key_DHK/"}
key_LDHK = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
numpy.savez(
    "read.npz",
    embedding_VD=found["params"]["embedding_VD"],
    hidden_LBMD=found["memory"]["hidden_LBMD"],
    squares_VD=found["optimizer"][0]["sum_of_squares"]["embedding_VD"],
    key_LDHK=key_LDHK,
)
fields = json.load(open(f"{folder}/_CHECKPOINT_METADATA"))["custom_metadata"]
assert not [name for name in sys.modules if name.startswith("adaptive_span")]
print(json.dumps(fields))
"""


def test_reads_without_this_package(tmp_path, state):
    """In a process that cannot import it."""
    about = {"position": Position(2, 26, False), "nonfinite_steps": 3, "config": {"seed": 5}, "learning_rate": 0.07}
    save(Checkpoints(tmp_path, tiny_config().checkpoint), state, 7, **about)
    reader = [sys.executable, "-I", "-c", READER, str(tmp_path / "7")]
    found = subprocess.run(reader, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    arrays = np.load(tmp_path / "read.npz")
    assert_array_equal(arrays["embedding_VD"], state.params["embedding_VD"])
    assert_array_equal(arrays["hidden_LBMD"], state.memory.hidden_LBMD)
    assert_array_equal(arrays["squares_VD"], state.opt_state[0].sum_of_squares["embedding_VD"])
    assert_array_equal(arrays["key_LDHK"], state.params["layers"]["attention"]["key_DHK"])

    fields = json.loads(found.stdout)
    assert fields["position"] == {"epoch": 2, "cursor": 26, "fresh": False}
    modules = (adaptive_span_jax, flax, jax, np, optax)
    assert fields["versions"] == {
        **{module.__name__: module.__version__ for module in modules},
        "orbax-checkpoint": orbax.checkpoint.__version__,
        "python": sys.version.split()[0],
    }
    assert (fields["config"], fields["learning_rate"], fields["nonfinite_steps"]) == ({"seed": 5}, 0.07, 3)


def test_training_continues_while_a_checkpoint_is_written(tmp_path, capsys, monkeypatch):
    """What is written is the state as it was, although its arrays are given away at once."""
    disk, seal = threading.Event(), sealing.seal
    monkeypatch.setattr(sealing, "seal", lambda *place: disk.wait(60) and seal(*place))
    config, mesh = tiny_config(), one_device_mesh()
    state = create_state(config, VOCABULARY, make_optimizer(config.train), mesh)
    expected = jax.tree.map(np.array, state)
    checkpoints = Checkpoints(tmp_path, config.checkpoint)
    checkpoints.save(to_trees(state), dataclasses.replace(ABOUT, step=3))
    jax.tree.map(lambda leaf: leaf.delete(), state)
    assert sealing.sealed_steps(tmp_path) == []
    assert "is saved" not in capsys.readouterr().out
    disk.set()
    checkpoints.finish()
    assert "step 3 is saved" in capsys.readouterr().out
    abstract = abstract_state(config, VOCABULARY, make_optimizer(config.train), mesh)
    jax.tree.map(assert_array_equal, restore_state(checkpoints, 3, abstract).params, expected.params)
    jax.tree.map(assert_array_equal, restore_state(checkpoints, 3, abstract).memory, expected.memory)


def test_newest_and_best_are_kept(tmp_path, state):
    config = dataclasses.replace(tiny_config().checkpoint, keep=2)
    checkpoints = Checkpoints(tmp_path, config)
    for number, bits in ((1, 3.0), (2, 2.0), (3, None), (4, 2.5), (5, float("nan")), (6, None)):
        save(checkpoints, state, number, dev_bits=bits)
    assert names(tmp_path) == ["2", "5", "6"]
    assert '"dev_bits": null' in (tmp_path / "5" / "_CHECKPOINT_METADATA").read_text(), "NaN is not JSON"
    again = Checkpoints(tmp_path, config)
    assert again.newest() == 6
    save(again, state, 7, dev_bits=1.0)
    assert names(tmp_path) == ["6", "7"]


def test_the_best_is_the_best_of_those_evaluated_on_the_same_tokens(tmp_path, state):
    """The start of dev may be easier than the rest: its bits say nothing beside those of all of dev."""
    checkpoints = Checkpoints(tmp_path, dataclasses.replace(tiny_config().checkpoint, keep=9))
    for number, bits, limit in ((1, 1.0, 500), (2, 2.5, 0), (3, 2.0, 0), (4, 2.2, 0), (5, None, 500)):
        save(checkpoints, state, number, dev_bits=bits, config={"evaluate": {"max_tokens": limit}})
    assert checkpoints.choose("best") == 3
    save(checkpoints, state, 6, dev_bits=1.5, config={"evaluate": {"max_tokens": 500}})
    assert checkpoints.choose("best") == 1
    save(checkpoints, state, 7, dev_bits=2.1, config={"evaluate": {}})
    assert checkpoints.choose("best") == 3, "written before there was a limit"


def test_another_number_of_devices_continues_the_same_training(tmp_path):
    """8 → 2 → 1 → 8 devices, shared out differently, memory and position included, beside one run on 8."""
    config = tiny_config(model={"dropout": 0.2, "attention": "plain"}, train={"batch_size": 8, "segment": 13})
    optimizer = make_optimizer(config.train)
    run = functools.partial(run_steps, config, ids=TEXT, vocabulary=VOCABULARY)
    expected = run(sharding.make_mesh(), 24).nats

    state, position, found = None, None, []
    for devices, fsdp in ((8, 1), (2, 2), (1, 1), (8, 1)):
        mesh = sharding.make_mesh(jax.devices()[:devices], fsdp)
        checkpoints = Checkpoints(tmp_path, config.checkpoint)
        if number := checkpoints.newest():
            state = restore_state(checkpoints, number, abstract_state(config, VOCABULARY, optimizer, mesh))
            position = checkpoints.describe(number).position
            assert int(state.memory.filled) > 0
        nats, _, state, position = run(mesh, 6, state=state, position=position)
        found += nats.tolist()
        save(checkpoints, state, len(found), position=position)
    assert position
    assert position.epoch > 0
    assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("file", ["params", "optimizer", "memory", "_CHECKPOINT_METADATA"])
def test_damage_is_named_and_set_aside_and_the_one_before_is_used(tmp_path, state, capsys, file):
    config = tiny_config().checkpoint
    checkpoints = Checkpoints(tmp_path, config)
    for number in (3, 4):
        save(checkpoints, state, number)
    damaged = tmp_path / "4" / file
    if damaged.is_dir():
        # The largest holds the arrays.
        damaged = max((path for path in damaged.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip(damaged, place=damaged.stat().st_size // 2)
    (tmp_path / "5.unfinished.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "5.unfinished.orbax-checkpoint-tmp" / "half").write_bytes(b"x")

    reader = Checkpoints(tmp_path, config)
    assert reader.newest() == 3
    assert names(tmp_path) == ["3", "4", "5.unfinished.orbax-checkpoint-tmp"], "a reader changes nothing"
    with pytest.raises(UserError, match=f"4 is damaged: {file}"):
        Checkpoints(tmp_path, config).restore(4, {"params": state.params})["params"]

    capsys.readouterr()
    writer = Checkpoints(tmp_path, config)
    writer.set_damaged_aside()
    assert writer.newest() == 3
    assert names(tmp_path) == ["3", "damaged"]
    assert names(tmp_path / "damaged") == ["4"], "never reported as saved, so deleted"
    printed = capsys.readouterr().out
    assert f"the checkpoint of step 4 is damaged: {file}" in printed
    assert f"moved it to {tmp_path}/damaged/4" in printed
    assert "deleted 5.unfinished.orbax-checkpoint-tmp: a process was killed while writing it" in printed
    save(writer, state, 4)
    assert Checkpoints(tmp_path, config).newest() == 4


def test_a_run_with_only_damaged_checkpoints_is_not_started_over(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, tiny_config().checkpoint)
    save(checkpoints, state, 3)
    (tmp_path / "3" / sealing.SUMS).unlink()
    again = Checkpoints(tmp_path, tiny_config().checkpoint)
    with pytest.raises(UserError, match="only damaged checkpoints"):
        again.set_damaged_aside()
    assert names(tmp_path) == ["3"]


def test_an_unfinished_folder_is_not_deleted_while_all_others_are_damaged(tmp_path, state):
    """Nothing is changed before the user has decided."""
    save(Checkpoints(tmp_path, tiny_config().checkpoint), state, 3)
    (tmp_path / "3" / sealing.SUMS).unlink()
    (tmp_path / "4.unfinished").mkdir()
    with pytest.raises(UserError, match="only damaged checkpoints"):
        Checkpoints(tmp_path, tiny_config().checkpoint).set_damaged_aside()
    assert names(tmp_path) == ["3", "4.unfinished"]


def test_a_fallback_that_was_damaged_meanwhile_is_found_at_the_next_save(tmp_path, state, capsys):
    """Otherwise it would count as kept, and the last whole one besides the newest would be deleted."""
    checkpoints = Checkpoints(tmp_path, dataclasses.replace(tiny_config().checkpoint, keep=2))
    for number in (1, 2):
        save(checkpoints, state, number)
    flip(tmp_path / "2" / "_CHECKPOINT_METADATA", place=5)
    capsys.readouterr()
    save(checkpoints, state, 3)
    assert names(tmp_path) == ["1", "3", "damaged"]
    assert names(tmp_path / "damaged") == ["2"]
    printed = capsys.readouterr().out
    assert "warning: the checkpoint of step 2 is damaged: _CHECKPOINT_METADATA has changed" in printed
    assert f"moved it to {tmp_path}/damaged/2" in printed
    # The older one is looked at, too, when it becomes the fallback.
    flip(tmp_path / "1" / "_CHECKPOINT_METADATA", place=5)
    flip(tmp_path / "3" / "_CHECKPOINT_METADATA", place=5)
    save(checkpoints, state, 4)
    assert names(tmp_path) == ["4", "damaged"]
    assert names(tmp_path / "damaged") == ["1", "2", "3"]
    assert Checkpoints(tmp_path, tiny_config().checkpoint).newest() == 4


def test_what_is_no_longer_kept_is_deleted_at_the_next_start_too(tmp_path, state):
    """However often a process is killed right after a save, checkpoints do not pile up."""
    for number in (1, 2, 3, 4):
        save(Checkpoints(tmp_path, dataclasses.replace(tiny_config().checkpoint, keep=9)), state, number)
    again = Checkpoints(tmp_path, dataclasses.replace(tiny_config().checkpoint, keep=2))
    again.set_damaged_aside()
    assert names(tmp_path) == ["1", "2", "3", "4"], "a run that may be refused deletes nothing"
    assert again.newest() == 4
    again.thin_out()
    assert names(tmp_path) == ["3", "4"]


def test_a_hurried_save_checks_no_other(tmp_path, state):
    """A process that was told to end has little time."""
    checkpoints = Checkpoints(tmp_path, dataclasses.replace(tiny_config().checkpoint, keep=2))
    save(checkpoints, state, 1)
    flip(tmp_path / "1" / "_CHECKPOINT_METADATA", place=5)
    checkpoints.save(to_trees(state), dataclasses.replace(ABOUT, step=2), check_older=False)
    checkpoints.finish()
    assert names(tmp_path) == ["1", "2"]


@pytest.fixture
def full_disk(monkeypatch):
    """The disk is full for as long as the list has an entry: one file of a checkpoint can still be written."""
    full, seal = [], sealing.seal

    def fails(directory, number):
        if full:
            (sealing.unfinished(directory, number) / "half").write_bytes(b"x")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        seal(directory, number)

    monkeypatch.setattr(sealing, "seal", fails)
    return full


def test_a_failed_save_leaves_the_last_good_one_and_training_continues(tmp_path, state, capsys, full_disk):
    config = dataclasses.replace(tiny_config().checkpoint, keep=1)
    checkpoints = Checkpoints(tmp_path, config)
    save(checkpoints, state, 3)
    full_disk.append(True)
    checkpoints.save(to_trees(state), dataclasses.replace(ABOUT, step=4))
    with contextlib.suppress(UserError):
        checkpoints.finish()
    checkpoints.wait_if_overdue(5)
    checkpoints.save(to_trees(state), dataclasses.replace(ABOUT, step=5))
    with pytest.raises(
        UserError, match=r"step 5 could not be written .*\(No space left on device\); the newest checkpoint is step 3"
    ):
        checkpoints.finish()
    printed = capsys.readouterr().out
    assert printed.count("the checkpoint of step 4 could not be written") == 1
    assert printed.count("Training continues") == 1, "after step 5 it is the error that says it"
    assert "step 4 is saved" not in printed
    assert names(tmp_path) == ["3"]
    full_disk.clear()
    save(checkpoints, state, 6)
    assert names(tmp_path) == ["6"]
    assert Checkpoints(tmp_path, config).newest() == 6


@pytest.mark.usefixtures("one_device", "no_report")
def test_a_failed_save_stops_the_run_if_so_configured(tmp_path, full_disk):
    fields: Any = {"checkpoint": {"every_steps": 6, "on_failure": "stop"}, "model": {"attention": "plain"}}
    assert train.train(tiny_config(train={"steps": 5}, **fields), tmp_path, "command") == 0
    full_disk.append(True)
    with pytest.raises(
        UserError, match=r"step 10 could not be written .* the newest checkpoint is step 5\. Free some disk space"
    ):
        train.train(tiny_config(train={"steps": 10_000}, **fields), tmp_path, "command")
    assert names(tmp_path / "checkpoints") == ["5"]
    full_disk.clear()
    assert train.train(tiny_config(train={"steps": 10}, **fields), tmp_path, "command") == 0
