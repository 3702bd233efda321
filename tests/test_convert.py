"""A checkpoint of the published code becomes a run that evaluates, generates and trains on, and goes back exactly."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import adaptive_span_jax
from adaptive_span_jax import convert, evaluate, report, train
from adaptive_span_jax.config import Config

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[1]

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install -r requirements-convert.txt")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, one_device):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def options(tmp_path):
    """The options that say what the golden checkpoint does not, with its evaluation text as dev."""
    golden = np.load(GOLDEN / "adaptive_tiny.npz")
    published = json.loads(str(golden["config"]))
    # Ids in order of first appearance: this text gives every symbol the id it has in the golden run.
    order, dev = list(range(published["vocab_size"])) * 20, golden["eval_tokens"].reshape(-1).tolist()
    (tmp_path / "text").write_bytes(bytes(symbol + 65 for symbol in order + dev + dev))
    total = len(order) + 2 * len(dev)
    shares = (len(order) / total, len(dev) / total, len(dev) / total)
    changes = {
        "data.source": "files",
        "data.path": tmp_path / "text",
        "data.splits": shares,
        "span.ramp": published["ramp"],
        "span.penalty": published["span_loss"],
        "model.dropout": 0.0,
        "train.segment": published["block_size"],
        "train.batch_size": published["batch_size"],
        "train.warmup_steps": published["lr_warmup"],
        "train.steps": 10,
        "evaluate.streams": golden["eval_tokens"].shape[0],
    }
    return ["--config=configs/bytes.py", *(f"--set={name}={value}" for name, value in changes.items())]


def same(found, expected):
    """Two checkpoints hold the same, to the last bit."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            same(found[name], expected[name])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_published_checkpoint_there_and_back(options, tmp_path, capsys):
    source, run, back = GOLDEN / "reference_tiny.pt", tmp_path / "run", tmp_path / "back.pt"
    assert convert.main([str(source), f"--workdir={run}", *options]) == 0
    printed = capsys.readouterr().out
    assert "step" in printed
    assert f"main.py --workdir={run} --mode=evaluate\n" in printed
    config = Config.from_dict(json.loads((run / "config.json").read_text()))

    assert evaluate.evaluate(run, "latest") == 0
    found = json.loads((run / "evaluation.json").read_text())
    expected = np.load(GOLDEN / "adaptive_tiny.npz")["full_eval_nll"]
    assert_allclose(found["dev_published"]["bits"] * math.log(2), expected, atol=1e-6)

    model = adaptive_span_jax.load(run)
    (text,) = model.generate("ABC", 10)
    assert len(text) == 10

    assert report.report(run, "latest") == 0
    assert json.loads((run / "report" / "summary.json").read_text())["step"] == 8

    assert convert.main([str(back), f"--workdir={run}", "--to-torch"]) == 0
    same(torch.load(back, weights_only=True), torch.load(source, weights_only=True))

    # Training goes on from step 8 with the optimizer's sums, and what comes of it converts there and back, too.
    assert train.train(config, run, "command") == 0
    assert "from step 8" in capsys.readouterr().out
    assert convert.main([str(back), f"--workdir={run}", "--to-torch"]) == 0
    again = tmp_path / "again"
    assert convert.main([str(back), f"--workdir={again}", *options]) == 0
    ours, theirs = adaptive_span_jax.load(run), adaptive_span_jax.load(again)
    assert ours.step == theirs.step == 10
    jax.tree.map(assert_array_equal, ours.finished.weights, theirs.finished.weights)
    assert torch.load(back, weights_only=True)["iter_no"] == 9


def broken(tmp_path, change):
    content = torch.load(GOLDEN / "reference_tiny.pt", weights_only=True)
    change(content)
    torch.save(content, tmp_path / "broken.pt")
    return str(tmp_path / "broken.pt")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda c: c["model"].update({"module.layers.0.attn.attn.persistent_memory.key": torch.zeros(1)}),
            "is a persistent-memory model",
        ),
        (
            lambda c: c["model"].update({"module.in_emb.emb_layers.0.weight": torch.zeros(1)}),
            "is a model with adaptive input and softmax",
        ),
        (lambda c: c["model"].pop("module.layers.1.norm1.bias"), "Missing: layers.1.norm1.bias"),
        (lambda c: c.pop("optimizer"), "it has no optimizer"),
        (lambda c: c["optimizer"]["state"].pop(3), "Adagrad sums for 42 weights"),
    ],
)
def test_other_checkpoints_are_refused(change, expected, options, tmp_path, capsys):
    assert convert.main([broken(tmp_path, change), f"--workdir={tmp_path / 'run'}", *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert expected in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set=span.limit=9"], "the checkpoint itself says that span.limit is 160"),
        (["--set=span.rump=9"], "it must be a field of configs/base.py"),
        (["--set=data.max_bytes=20"], "knows 29 symbols, but the text"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, expected, options, tmp_path, capsys):
    source = str(GOLDEN / "reference_tiny.pt")
    assert convert.main([source, f"--workdir={tmp_path / 'run'}", *options, *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_a_file_that_is_no_checkpoint(tmp_path, capsys):
    (tmp_path / "text.pt").write_bytes(b"not a pickle")
    assert convert.main([str(tmp_path / "text.pt"), f"--workdir={tmp_path}/run"]) == 2
    assert "is not a PyTorch checkpoint" in capsys.readouterr().err
    assert convert.main([str(tmp_path / "nowhere.pt"), f"--workdir={tmp_path}/run"]) == 2
    assert "nowhere.pt cannot be read" in capsys.readouterr().err
