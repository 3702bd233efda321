"""Warnings appear when they should, and only then."""

import html
import json

import numpy as np
import pytest

from adaptive_span_jax.commands import train
from adaptive_span_jax.training import diagnostics
from tests.conftest import tiny_config

LIMIT = 100


def run(z_of_step, *, steps=range(1, 21), bits=2.0, penalty=0.001, kind="adaptive"):
    """Names of the concerns about a run with these spans."""
    config = tiny_config(span={"limit": LIMIT, "ramp": 5, "kind": kind}, train={"warmup_steps": 3})
    spans = [{"step": step, "z_LH": np.broadcast_to(z_of_step(step), (3, 2)).tolist()} for step in steps]
    metrics = [{"step": step, "train_bits": bits, "penalty_nats": penalty} for step in steps]
    metrics.append({"step": 20, "dev_bits": 2.0})
    return diagnostics.concerns(config, metrics, spans)


def names(concerns):
    return [concern.name for concern in concerns]


def growing(step):
    return np.array([0.0, 2.0 * step])


def test_a_healthy_run_is_left_alone():
    assert run(growing) == []


def test_frozen_spans():
    (found,) = run(lambda step: min(step, 8.0))
    assert found.name == "frozen"
    assert "z = 8.0 on average" in found.found
    assert "config.span.penalty" in found.advice
    (found,) = run(lambda step: 0.0)
    assert "z = 0" in found.found


def test_one_moving_head_is_enough():
    assert run(lambda step: np.array([[0.0, 0.0], [0.0, 0.1 * step], [0.0, 0.0]])) == []


def test_spans_may_stand_still_during_warm_up_and_shortly_after():
    assert run(lambda step: 0.0, steps=range(1, 9)) == []


def test_saturated_spans():
    (found,) = run(lambda step: np.array([5.0 * step, 2.0 * step]))
    assert found.name == "saturated"
    assert "3 of 6 heads read all S = 100" in found.found
    assert "config.span.limit" in found.advice


def test_penalty_that_dominates():
    (found,) = run(growing, penalty=0.5)
    assert found.name == "penalty"
    assert "27 % of the loss at step 20" in found.found
    assert run(growing, penalty=0.1) == []


def test_several_at_once():
    assert names(run(lambda step: 100.0, penalty=1.0)) == ["frozen", "saturated", "penalty"]


def test_fixed_spans_are_meant_to_be_frozen_and_full():
    assert run(lambda step: 100.0, kind="fixed") == []


def test_nothing_logged_yet():
    assert run(growing, steps=()) == []


@pytest.mark.parametrize(
    ("kind", "ramp", "warned"),
    [("adaptive", 38, 1), ("dynamic", 38, 1), ("adaptive", 37, 0), ("adaptive", 5, 0), ("fixed", 38, 0)],
)
def test_a_ramp_longer_than_the_limit(kind, ramp, warned):
    config = tiny_config(span={"kind": kind, "ramp": ramp, "limit": 37})
    assert names(diagnostics.config_concerns(config)) == ["ramp"] * warned


def test_concerns_about_the_config_are_said_once_at_the_start(tmp_path, one_device, no_report, capsys):
    config = tiny_config(span={"ramp": 38, "limit": 37}, train={"steps": 2}, model={"attention": "plain", "layers": 1})
    assert train.train(config, tmp_path, "command") == 0
    start, _, rest = capsys.readouterr().out.partition("first step finished")
    assert start.count("warning: config.span.ramp is 38, longer than config.span.limit, which is 37") == 1
    assert "config.span.ramp is" not in rest


@pytest.mark.slow
def test_training_tensorboard_and_report_all_warn(tmp_path, one_device, capsys):
    config = tiny_config(span={"kind": "dynamic", "penalty": 1.0}, log={"every_steps": 3}, train={"steps": 8})
    assert train.train(config, tmp_path, "command") == 0
    summary = json.loads((tmp_path / "report" / "summary.json").read_text())
    page, printed = (tmp_path / "report" / "index.html").read_text(), capsys.readouterr().out
    (events,) = (tmp_path / "tensorboard").iterdir()
    logged = events.read_bytes()
    assert summary["concerns"]
    for concern in summary["concerns"]:
        assert f"warning: {concern['found']}. {concern['advice']}" in printed
        assert f"health/{concern['name']}".encode() in logged
        assert concern["advice"].encode() in logged
        assert concern["found"] in html.unescape(page)
