"""A checkpoint of the published code becomes a run that evaluates, generates and trains, and is exported exactly."""

import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import adaptive_span_jax
from adaptive_span_jax.commands import evaluate, train
from adaptive_span_jax.commands import report as report_command
from adaptive_span_jax.commands.export_torch import export_torch
from adaptive_span_jax.commands.import_torch import import_torch
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from configs import bytes as bytes_config

GOLDEN = Path(__file__).parents[1] / "golden"
ROOT = Path(__file__).parents[2]

torch = pytest.importorskip("torch", reason='PyTorch is not installed: pip install ".[torch]"')

FIELDS = bytes_config.get_config().to_dict()


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
        "data.path": str(tmp_path / "text"),
        "data.splits": shares,
        "span.ramp": published["ramp"],
        "span.penalty": published["span_loss"],
        "model.dropout": 0.0,
        "train.segment": published["block_size"],
        "train.batch_size": published["batch_size"],
        "train.warmup_steps": published["lr_warmup"],
        "train.steps": 10,
        "evaluate.batch_size": golden["eval_tokens"].shape[0],
    }
    return changes


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
    assert import_torch(source, run, FIELDS, options) == 0
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

    assert report_command.report(run, "latest") == 0
    assert json.loads((run / "report" / "summary.json").read_text())["step"] == 8

    assert export_torch(back, run, "latest") == 0
    same(torch.load(back, weights_only=True), torch.load(source, weights_only=True))

    # Training resumes from step 8 with the optimizer's sums, and what comes of it converts there and back, too.
    assert train.train(config, run, "command") == 0
    assert "from step 8" in capsys.readouterr().out
    assert export_torch(back, run, "latest") == 0
    again = tmp_path / "again"
    assert import_torch(back, again, FIELDS, options) == 0
    ours, theirs = adaptive_span_jax.load(run), adaptive_span_jax.load(again)
    assert ours.step == theirs.step == 10
    jax.tree.map(assert_array_equal, ours.decoder.weights, theirs.decoder.weights)
    assert torch.load(back, weights_only=True)["iter_no"] == 9


def broken(tmp_path, change):
    content = torch.load(GOLDEN / "reference_tiny.pt", weights_only=True)
    change(content)
    torch.save(content, tmp_path / "broken.pt")
    return tmp_path / "broken.pt"


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
def test_other_checkpoints_are_refused(change, expected, options, tmp_path):
    with pytest.raises(UserError, match=re.escape(expected)):
        import_torch(broken(tmp_path, change), tmp_path / "run", FIELDS, options)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"span.limit": 9}, "--config.span.limit=9 contradicts the checkpoint, in which span.limit is 160"),
        ({"model.sandwich": 1}, "--config.model.sandwich=1 contradicts the checkpoint, in which model.sandwich is 0"),
        ({"span.rump": 9}, "config.span.rump is not a known field"),
        ({"data.max_bytes": 20}, "has 29 symbols, but the text"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes, expected, options, tmp_path):
    with pytest.raises(UserError, match=re.escape(expected)):
        import_torch(GOLDEN / "reference_tiny.pt", tmp_path / "run", FIELDS, options | changes)


def test_another_order_of_sublayers_cannot_be_exported(options, tmp_path, no_report):
    fields = FIELDS | {"model": FIELDS["model"] | {"layers": 2, "width": 8, "heads": 2, "sandwich": 1}}
    config = Config.from_dict(fields).changed(options | {"span.limit": 20, "train.steps": 1})
    assert train.train(config, tmp_path / "run", "command") == 0
    with pytest.raises(UserError, match=r"has config\.model\.sandwich=1, .* not support; only runs with"):
        export_torch(tmp_path / "back.pt", tmp_path / "run", "latest")
    assert not (tmp_path / "back.pt").exists()


def test_a_text_that_is_not_known_needs_a_config(tmp_path):
    with pytest.raises(UserError, match=r"has 29 symbols, .* pass a config with its text: --config=bytes"):
        import_torch(GOLDEN / "reference_tiny.pt", tmp_path / "run", None, {})


def test_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "text.pt").write_bytes(b"not a pickle")
    with pytest.raises(UserError, match="is not a PyTorch checkpoint"):
        import_torch(tmp_path / "text.pt", tmp_path / "run", None, {})
