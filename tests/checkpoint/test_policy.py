"""When saves start, and when training waits for one."""

import dataclasses
import threading

import pytest

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.training.state import to_trees
from tests.conftest import tiny_config
from tests.support.checkpoints import ABOUT, make_state, names, save


def test_due_by_steps_and_by_minutes(tmp_path, monkeypatch):
    config = dataclasses.replace(tiny_config().checkpoint, every_steps=10, every_minutes=0.5)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    by_both, by_steps = (
        Checkpoints(tmp_path, config),
        Checkpoints(tmp_path, dataclasses.replace(config, every_minutes=0)),
    )
    assert [number for number in range(1, 20) if by_both.due(number)] == [8, 16]
    now = 123.9
    assert not by_both.due(11)
    now = 124.0
    assert by_both.due(11)
    assert not by_steps.due(11)


@pytest.mark.parametrize(("number", "seconds"), [(19, 0.0), (18, 30.1)])
def test_training_waits_for_a_save_rather_than_risk_more_than_an_interval(tmp_path, monkeypatch, number, seconds):
    """Step 8 is saved, step 16 is being saved: with an interval of 10 steps, step 18 may still be trained."""
    now, may_seal, state = 100.0, threading.Event(), make_state()

    def slow(directory, which, seal=sealing.seal):
        assert may_seal.wait(60)
        seal(directory, which)

    monkeypatch.setattr("time.monotonic", lambda: now)
    config = dataclasses.replace(tiny_config().checkpoint, every_steps=10, every_minutes=0.5)
    with Checkpoints(tmp_path, config) as checkpoints:
        save(checkpoints, state, 8)
        monkeypatch.setattr(sealing, "seal", slow)
        checkpoints.save(to_trees(state), dataclasses.replace(ABOUT, step=16))
        now += 29
        checkpoints.wait_if_overdue(18)
        assert "16" not in names(tmp_path)
        now = 100 + seconds
        waits = threading.Thread(target=checkpoints.wait_if_overdue, args=(number,))
        waits.start()
        waits.join(0.2)
        assert waits.is_alive()
        may_seal.set()
        waits.join(60)
        assert names(tmp_path) == ["16", "8"]
