"""Whole runs: training, resuming, evaluating, interruptions, and the files that remain."""

import dataclasses
import functools
import json
import os
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.checkpoint import sealing
from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.commands import evaluate, train
from adaptive_span_jax.data import corpus
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.report import report
from adaptive_span_jax.runtime import chips, sharding
from adaptive_span_jax.training import step
from adaptive_span_jax.training.metrics import read_lines, utilization
from adaptive_span_jax.training.optimizer import make_optimizer
from adaptive_span_jax.training.state import abstract_state, restore_state
from tests.conftest import tiny_config, use_devices
from tests.support import training
from tests.support.results import without_times

VOCABULARY = 13
TEXT = np.random.default_rng(2).integers(0, VOCABULARY, 700).astype(np.uint8)
QUICK = {"attention": "plain", "layers": 1}  # to compile, where it does not matter


pytestmark = pytest.mark.usefixtures("one_device", "no_report")


run_steps = functools.partial(training.run_steps, ids=TEXT, vocabulary=VOCABULARY)


def test_dynamic_spans_move():
    config = tiny_config(
        span={"kind": "dynamic", "penalty": 1e-3}, train={"batch_size": 2, "warmup_steps": 1, "steps": 20}
    )
    nats, z_LH, *_ = run_steps(config, sharding.make_mesh(), 20)
    initial = config.span.limit / (1 + np.exp(4))
    assert np.abs(z_LH - initial).max() > 0.5
    assert nats[-3:].mean() < nats[:3].mean()


@pytest.mark.slow
def test_bfloat16_trains_like_float32():
    exact = run_steps(tiny_config(), sharding.make_mesh(), 12).nats
    rough, _, state, _ = run_steps(tiny_config(model={"compute_dtype": "bfloat16"}), sharding.make_mesh(), 12)
    # Losses of about 2.6 nats; roundings of 0.4 % in the activations end as some hundredths.
    assert_allclose(rough, exact, atol=0.06)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state[0]))} == {np.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"sandwich": 1}, {"persistent": 7}])
def test_resumed_training_is_the_same_training(tmp_path, sizes):
    """Bit for bit, with dropout, warm-up and a new epoch on the way."""
    fields = {"model": {"dropout": 0.2, **sizes}, "data": {"max_bytes": 1500}}
    whole, parts = tiny_config(train={"steps": 60}, **fields), tiny_config(train={"steps": 23}, **fields)
    assert train.train(whole, tmp_path / "whole", "command") == 0
    assert train.train(parts, tmp_path / "parts", "command") == 0
    assert train.train(whole, tmp_path / "parts", "command") == 0

    def last(name):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", whole.checkpoint)
        saved = checkpoints.describe(60)
        abstract = abstract_state(
            whole, len(corpus.load(whole.data).vocabulary), make_optimizer(whole.train), sharding.make_mesh()
        )
        return saved, restore_state(checkpoints, 60, abstract)

    (one, state), (two, resumed) = last("whole"), last("parts")
    assert one.position.epoch > 0
    assert one.position == two.position
    jax.tree.map(assert_array_equal, state, resumed)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "parts")]
    assert results[0]["test_bits"] == results[1]["test_bits"]


def test_workdir_holds_what_is_promised(tmp_path, capsys, monkeypatch):
    written = []
    use_devices(monkeypatch, 2)
    monkeypatch.setattr(report, "write_report", lambda *_: written.append(True))
    monkeypatch.setitem(chips.PEAK, "cpu", (1e12, 1e9))
    config = tiny_config(train={"steps": 20}, log={"every_steps": 5}, evaluate={"every_steps": 10})
    assert train.train(config, tmp_path, "python main.py") == 0
    printed = capsys.readouterr().out
    for expected in (
        "parameters",
        "fingerprint",
        "order-2 entropy",
        "step 10/20",
        "bits per byte",
        "dev bits per byte",
    ):
        assert expected in printed
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(config.to_json())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "train_bits" in line]
    assert [line["step"] for line in logged] == [5, 10, 15, 20]
    for line in logged:
        tokens = line["tokens_per_second"]
        assert line["tokens_per_second_per_device"] == tokens / 2
        share = utilization(config, line["average_span"], tokens, jax.devices()[:2])
        assert_allclose(line["flops_utilisation"], share, rtol=1e-6)
        assert line["mfu"] == line["flops_utilisation"]
    assert [line["step"] for line in lines if "dev_bits" in line] == [10, 20]
    assert list((tmp_path / "tensorboard").iterdir())
    assert written == [True]  # what is in it: tests/report/test_report.py
    result = json.loads((tmp_path / "result.json").read_text())
    for name in ("dev_bits", "test_bits", "order2_bits", "average_span", "longest_span", "steps", "seconds"):
        assert isinstance(result[name], int | float)
    assert result["mfu"] == np.median([line["mfu"] for line in logged])
    assert f"MFU                 {100 * result['mfu']:.1f} % of the devices' peak" in printed
    assert f"goodput             {100 * result['goodput']:.1f} % of" in printed
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert all(name in events for name in (b"mfu", b"goodput"))

    assert train.train(config, tmp_path, "python main.py") == 0
    assert "This run is complete" in capsys.readouterr().out

    assert evaluate.evaluate(tmp_path, "latest") == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert_allclose(found["dev_exact"]["bits"], result["dev_bits"], rtol=1e-6)
    assert found["dev_exact"]["tokens"] == 999
    assert_allclose(found["dev_exact"]["bits"], found["dev_published"]["bits"], rtol=0.05)


def test_evaluations_while_training_can_be_shorter_but_the_result_is_of_all_of_dev(tmp_path, capsys):
    fields: Any = {"train": {"steps": 4}, "model": QUICK}
    assert train.train(tiny_config(evaluate={"every_steps": 2, "max_tokens": 300}, **fields), tmp_path / "a", "") == 0
    printed = capsys.readouterr().out
    assert train.train(tiny_config(evaluate={"every_steps": 2}, **fields), tmp_path / "b", "") == 0
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("a", "b")]
    assert results[0]["dev_tokens"] == 999
    assert without_times(results[0]) == without_times(results[1])
    logs = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("a", "b")]
    some, all_of_it = ([line["dev_bits"] for line in log if "dev_bits" in line] for log in logs)
    assert len(some) == len(all_of_it) == 2
    assert all_of_it[-1] == results[0]["dev_bits"]
    assert not set(some) & set(all_of_it)
    assert f"step 4: {some[-1]:.3f} bits per byte on the first 300 tokens of dev" in printed
    # What checkpoints are compared by is on the same tokens, also in the last one.
    checkpoints = Checkpoints(tmp_path / "a" / "checkpoints", tiny_config().checkpoint)
    assert [checkpoints.describe(number).dev_bits for number in (2, 4)] == some


def test_ctrl_c_saves_and_the_same_command_resumes(tmp_path, capsys):
    config = tiny_config(train={"steps": 100_000})

    def interrupt_when_running():
        while "step 10/" not in capsys.readouterr().out:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    log_often = dataclasses.replace(config, log=dataclasses.replace(config.log, every_steps=10))
    thread = threading.Thread(target=interrupt_when_running)
    thread.start()
    code = train.train(log_often, tmp_path, "python main.py --workdir=here")
    thread.join()
    assert code == 130
    assert "to resume: python main.py --workdir=here" in capsys.readouterr().out
    reached = sealing.sealed_steps(tmp_path / "checkpoints")[-1]
    finish = dataclasses.replace(log_often, train=dataclasses.replace(config.train, steps=reached + 3))
    assert train.train(finish, tmp_path, "command") == 0
    printed = capsys.readouterr().out
    assert f"from step {reached:,}" in printed
    assert "changed since the last checkpoint: config.train.steps" in printed


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_only_its_own_steps(tmp_path, capsys):
    fields: Any = {"checkpoint": {"every_steps": 4}, "model": {"dropout": 0.2} | QUICK}
    config = tiny_config(train={"steps": 10}, **fields)
    assert train.train(config, tmp_path / "whole", "command") == 0
    assert train.train(tiny_config(train={"steps": 8}, **fields), tmp_path / "damaged", "command") == 0
    newest = tmp_path / "damaged" / "checkpoints" / "8"
    victim = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 4
    victim.write_bytes(content)
    capsys.readouterr()
    assert train.train(config, tmp_path / "damaged", "command") == 0
    printed = capsys.readouterr().out
    assert f"the checkpoint of step 8 is damaged: {victim.relative_to(newest)} has changed" in printed
    assert f"moved it to {newest.parent / 'damaged' / '8'}" in printed
    assert "from step 4" in printed
    assert victim.name in {path.name for path in (newest.parent / "damaged" / "8").rglob("*")}
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "damaged")]
    assert results[0]["test_bits"] == results[1]["test_bits"]


def test_a_run_resumes_with_another_rate_and_penalty(tmp_path, capsys):
    fields: Any = {"log": {"every_steps": 1}, "model": QUICK}
    start: Any = {"steps": 4, "warmup_steps": 0}
    assert train.train(tiny_config(train=start, **fields), tmp_path, "command") == 0
    changed = tiny_config(train=start | {"steps": 8, "learning_rate": 0.02}, span={"penalty": 3e-3}, **fields)
    capsys.readouterr()
    assert train.train(changed, tmp_path, "command") == 0
    printed = capsys.readouterr().out
    for expected in ("config.train.learning_rate: 0.07 → 0.02", "config.span.penalty: 0.0001 → 0.003"):
        assert f"changed since the last checkpoint: {expected}\n" in printed
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line for line in lines if "learning_rate" in line}
    assert [round(logged[number]["learning_rate"], 6) for number in (3, 5)] == [0.07, 0.02]
    assert logged[5]["penalty_nats"] > 20 * logged[3]["penalty_nats"]
    assert json.loads((tmp_path / "config.json").read_text())["span"]["penalty"] == 3e-3


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path):
    assert train.train(tiny_config(train={"steps": 2}), tmp_path, "command") == 0
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"config\.model\.width: 22 → 24"):
        train.train(tiny_config(model={"width": 24}), tmp_path, "command")
    with pytest.raises(UserError, match=r"config\.data\.max_bytes"):
        train.train(tiny_config(data={"max_bytes": 21_000}), tmp_path, "command")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_full_disk_is_noticed_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"1000 B free, but 4 checkpoints .* would take"):
        train.train(tiny_config(), tmp_path, "command")


def test_an_unwritable_workdir_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file/run is not writable"):
        train.train(tiny_config(), tmp_path / "file" / "run", "command")


def test_batch_that_devices_cannot_share(tmp_path, monkeypatch):
    use_devices(monkeypatch, 8)
    with pytest.raises(UserError, match=r"config.train.batch_size is 12, which cannot be split evenly over 8 devices"):
        train.train(tiny_config(train={"batch_size": 12}), tmp_path, "command")


def test_evaluate_needs_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="has no checkpoints"):
        evaluate.evaluate(tmp_path, "latest")


class Watched:
    """A device array that says when the host reads it, and is otherwise handed on."""

    def __init__(self, array, on_read):
        self.array, self._on_read = array, on_read

    def __array__(self, *arguments, **keywords):
        self._on_read()
        return np.asarray(self.array, *arguments, **keywords)

    def __float__(self):
        return float(np.asarray(self))

    def __int__(self):
        return int(np.asarray(self))

    def __bool__(self):
        return bool(np.asarray(self))


def test_the_loop_never_waits_for_the_step_under_way(tmp_path, monkeypatch):
    """No transfer that nobody asked for, and what a step found is read only after the next one is under way."""
    happened, made, make_train_step = [], [], step.make_train_step

    def make_watched(*arguments):
        train_step: Any = make_train_step(*arguments)
        made.append(train_step)

        def watched_step(state, segment):
            number = 1 + sum(kind == "start" for kind, _ in happened)
            happened.append(("start", number))
            state = jax.tree.map(lambda leaf: getattr(leaf, "array", leaf), state)
            with jax.transfer_guard("disallow"):
                state, metrics = train_step(state, segment)
            watched = jax.tree.map(lambda leaf: Watched(leaf, lambda: happened.append(("read", number))), metrics)
            return dataclasses.replace(
                state, step=Watched(state.step, lambda: happened.append(("state", number)))
            ), watched

        return watched_step

    monkeypatch.setattr(step, "make_train_step", make_watched)
    monkeypatch.setattr(step, "make_reset_memory", lambda state: lambda state: state)
    config = tiny_config(train={"steps": 12}, log={"every_steps": 3}, checkpoint={"every_steps": 1000})
    assert train.train(config, tmp_path, "command") == 0
    assert [number for kind, number in happened if kind == "start"] == list(range(1, 13))
    under_way = 0
    for kind, number in happened:
        if kind == "start":
            under_way = number
        elif number < 12:  # after the last step there is nothing else to do
            assert kind == "read", "waited for the state"
            assert number < under_way, "waited for the step under way"
    assert sum(kind == "read" for kind, _ in happened) > 10
    assert [train_step._cache_size() for train_step in made] == [1], "compiled more than once"
