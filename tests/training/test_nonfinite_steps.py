"""A non-finite loss or gradient: the step is skipped, training continues or ends, and no state is spoiled."""

import json
import os
import signal
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.commands import train
from adaptive_span_jax.data.segments import Segment
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training import step
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import create_state
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device", "no_report")


@pytest.mark.parametrize("kind", ["adaptive", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_one_bad_segment_changes_nothing_but_the_step(kind):
    """One symbol's embedding is not a number: segments that have the symbol are bad, all others are not."""
    config = tiny_config(span={"kind": kind})
    mesh, optimizer = sharding.make_mesh(), make_optimizer(config.train)
    state = create_state(config, 5, optimizer, mesh)
    state.params["embedding_VD"] = state.params["embedding_VD"].at[4].set(jnp.nan)
    train_step: Any = step.make_train_step(config, optimizer, state, mesh)
    tokens_BT = np.random.default_rng(1).integers(0, 4, (2, 13)).astype(np.int32)
    good, bad = Segment(tokens_BT, tokens_BT), Segment(np.where(np.arange(13) == 6, 4, tokens_BT), tokens_BT)

    def read(state, segment):
        before = jax.tree.map(np.array, state)
        state, metrics = train_step(state, sharding.place_segment(mesh, segment))
        return before, jax.tree.map(np.array, state), metrics

    before, after, metrics = read(state, good)
    assert metrics.good
    assert np.abs(after.params["output_DV"] - before.params["output_DV"]).max() > 0
    before, after, metrics = read(jax.device_put(after), bad)
    assert not metrics.good
    assert not np.isfinite(metrics.nats)
    jax.tree.map(assert_array_equal, before.params, after.params)
    jax.tree.map(assert_array_equal, before.opt_state[0], after.opt_state[0])
    assert after.step == before.step + 1
    jax.tree.map(assert_array_equal, before.memory, after.memory)
    assert int(after.opt_state[1].count) == after.step, "the schedule follows the steps"
    before, after, metrics = read(jax.device_put(after), good)
    assert metrics.good
    assert np.abs(after.params["output_DV"] - before.params["output_DV"]).max() > 0


def test_a_bad_gradient_of_a_finite_loss_is_left_out():
    """Logits of 1e30 have a finite loss; the sum of the gradient's squares overflows."""
    config = tiny_config(model={"attention": "plain"})
    mesh, optimizer = sharding.make_mesh(), make_optimizer(config.train)
    state = create_state(config, 5, optimizer, mesh)
    norm = state.params["layers"]["feedforward_norm"]
    norm["scale"] = norm["scale"].at[-1].multiply(1e30)
    tokens_BT = np.random.default_rng(1).integers(0, 5, (2, 13)).astype(np.int32)
    before = jax.tree.map(np.array, state.params)
    train_step = step.make_train_step(config, optimizer, state, mesh)
    state, metrics = train_step(state, sharding.place_segment(mesh, Segment(tokens_BT, tokens_BT)))
    assert np.isfinite(metrics.nats)
    assert not metrics.good
    jax.tree.map(assert_array_equal, before, state.params)


# One step with this rate, and no forward pass is finite any more.
WILD = {"learning_rate": 1e37, "warmup_steps": 0}


def left(workdir):
    """What a run must not leave behind: checkpoints by their steps, and files that only a finished run has."""
    files = [name for name in ("result.json", "report") if (workdir / name).exists()]
    return sealing.sealed_steps(workdir / "checkpoints"), files


def test_a_run_that_ends_on_a_non_finite_step_saves_and_finishes_nothing(tmp_path, capsys):
    fields: Any = {"model": {"attention": "plain", "layers": 1}}
    with pytest.raises(
        UserError, match=r"ended on a non-finite step, step 4, .*no checkpoint.*config.train.learning_r"
    ):
        train.train(tiny_config(train={"steps": 4} | WILD, **fields), tmp_path / "new", "command")
    assert "is saved" not in capsys.readouterr().out
    assert left(tmp_path / "new") == ([], [])

    assert train.train(tiny_config(train={"steps": 3}, **fields), tmp_path / "old", "command") == 0
    finished = (tmp_path / "old" / "result.json").read_bytes()
    with pytest.raises(UserError, match=r"step 6, .*newest checkpoint is step 3"):
        train.train(tiny_config(train={"steps": 6} | WILD, **fields), tmp_path / "old", "command")
    assert left(tmp_path / "old")[0] == [3]
    assert (tmp_path / "old" / "result.json").read_bytes() == finished, "that of step 3"
    # With a rate that works it resumes from there.
    assert train.train(tiny_config(train={"steps": 6}, **fields), tmp_path / "old", "command") == 0


def test_a_run_whose_last_evaluation_is_not_finite_saves_and_finishes_nothing(tmp_path):
    """The step itself was finite: its loss and gradient are from before the update."""
    config = tiny_config(train={"steps": 1} | WILD, model={"attention": "plain", "layers": 1})
    with pytest.raises(
        UserError, match=r"loss on dev after step 1 is not finite.*no checkpoint.*config.train.learning_r"
    ):
        train.train(config, tmp_path, "command")
    assert left(tmp_path) == ([], [])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1] == {"step": 1, "dev_bits": None}


def test_a_loss_on_test_that_is_not_finite_is_no_result(tmp_path, monkeypatch):
    score, calls = train.score, []

    def last_one_fails(*arguments):
        calls.append(arguments)
        found = score(*arguments)
        return found._replace(nats=float("inf")) if len(calls) == 2 else found

    monkeypatch.setattr(train, "score", last_one_fails)
    config = tiny_config(train={"steps": 2}, model={"attention": "plain", "layers": 1})
    with pytest.raises(UserError, match=r"loss on test after step 2 is not finite.*checkpoint is step 2"):
        train.train(config, tmp_path, "command")
    assert left(tmp_path) == ([2], [])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_after_a_non_finite_step_saves_nothing(tmp_path, capsys, number, code):
    printed = []

    def interrupt_when_bad():
        while "is not finite" not in "".join(printed):
            printed.append(capsys.readouterr().out)
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt_when_bad)
    thread.start()
    bad: Any = {"steps": 100_000, "max_nonfinite_steps": 100_000} | WILD
    assert train.train(tiny_config(train=bad, model={"attention": "plain", "layers": 1}), tmp_path, "command") == code
    thread.join()
    ended = "".join(printed) + capsys.readouterr().out
    assert "is saved" not in ended
    assert "is non-finite and not saved; there is no checkpoint yet" in ended
    assert left(tmp_path) == ([], [])


@pytest.mark.usefixtures("one_device", "no_report")
def test_a_run_that_does_not_recover_ends_and_keeps_what_was_good(tmp_path, capsys):
    fields: Any = {
        "checkpoint": {"every_steps": 4},
        "log": {"every_steps": 1},
        "model": {"dropout": 0.1, "attention": "plain"},
    }
    assert train.train(tiny_config(train={"steps": 8}, **fields), tmp_path, "command") == 0
    capsys.readouterr()
    # One step with this rate, and no forward pass is finite any more.
    wild = tiny_config(train={"steps": 100, "learning_rate": 1e37, "max_nonfinite_steps": 7}, **fields)
    with pytest.raises(UserError, match=r"7 steps in a row up to step 16 .*smaller config.train.learning_rate"):
        train.train(wild, tmp_path, "command")
    printed = capsys.readouterr().out
    assert "step 10 skipped: loss or gradient is not finite (1 in a row, 1 in total)" in printed
    assert "(7 in a row, 7 in total)" in printed
    assert sealing.sealed_steps(tmp_path / "checkpoints") == [4, 8]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["nonfinite_steps"] > 0
    # With a rate that works it resumes from there.
    assert train.train(tiny_config(train={"steps": 12}, **fields), tmp_path, "command") == 0
    assert "from step 8" in capsys.readouterr().out
