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
    return options_of("adaptive_tiny", tmp_path)


def options_of(name, tmp_path):
    """The options that say what a golden checkpoint does not, with its evaluation text as dev."""
    golden = np.load(GOLDEN / f"{name}.npz")
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
        assert type(found) is type(expected)
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


def test_all_attention_checkpoint_there_and_back(tmp_path, capsys, no_report):
    source, run, back = GOLDEN / "persistent_tiny.pt", tmp_path / "run", tmp_path / "back.pt"
    options = options_of("persistent_tiny", tmp_path)
    assert import_torch(source, run, FIELDS, options) == 0
    assert "13 persistent vectors per head" in capsys.readouterr().out
    config = Config.from_dict(json.loads((run / "config.json").read_text()))
    assert config.model.persistent == 13

    assert evaluate.evaluate(run, "latest") == 0
    found = json.loads((run / "evaluation.json").read_text())
    expected = np.load(GOLDEN / "persistent_tiny.npz")["full_eval_nll"]
    assert_allclose(found["dev_published"]["bits"] * math.log(2), expected, atol=1e-6)

    assert export_torch(back, run, "latest") == 0
    same(torch.load(back, weights_only=True), torch.load(source, weights_only=True))

    assert train.train(config, run, "command") == 0
    assert "from step 8" in capsys.readouterr().out
    (text,) = adaptive_span_jax.load(run).generate("ABC", 10)
    assert len(text) == 10


def synthetic(path, *, heads, width, limit, count, adaptive, layers=2, symbols=29):
    """Writes an all-attention checkpoint of random weights and sums, in the published order."""
    random = torch.Generator().manual_seed(0)
    head_width, shapes, listed = width // heads, {}, {}
    shapes["key_pe"] = (1, head_width, limit)
    shapes |= {"in_emb.weight": (symbols, width), "out_emb.weight": (symbols, width), "out_emb.bias": (symbols,)}
    for layer in range(layers):
        attention = f"layers.{layer}.attn."
        if adaptive:
            shapes[f"{attention}attn.adaptive_span._mask.current_val"] = (heads, 1, 1)
        shapes[f"{attention}attn.persistent_memory.key"] = (heads, head_width, count)
        shapes[f"{attention}attn.persistent_memory.val"] = (heads, count, head_width)
        shapes |= {f"{attention}proj_{name}.weight": (width, width) for name in ("query", "out", "val", "key")}
        shapes |= {f"layers.{layer}.norm1.{name}": (width,) for name in ("weight", "bias")}
    weights = {f"module.{name}": torch.rand(shape, generator=random) for name, shape in shapes.items()}
    for name, tensor in weights.items():
        listed[name] = tensor
        template = torch.arange(1 - limit, 1, dtype=torch.float32)
        if name.endswith("current_val"):
            listed[name.replace("current_val", "mask_template")] = template
        if adaptive and name.endswith("persistent_memory.val"):
            own = name.replace("persistent_memory.val", "adaptive_span._mask.current_val")
            again = own.replace("adaptive_span", "persistent_memory.adaptive_span")
            listed |= {again: weights[own], again.replace("current_val", "mask_template"): template.clone()}
    state = {n: {"step": 5, "sum": torch.rand(w.shape, generator=random)} for n, w in enumerate(weights.values())}
    group = {"lr": 0.07, "grad_clip": 0.03, "lr_decay": 0, "weight_decay": 0, "params": list(range(len(weights)))}
    content = {"iter_no": 4, "model": listed, "logger": {}, "optimizer": {"state": state, "param_groups": [group]}}
    torch.save(content | {"scheduler_iter": 5}, path)
    return weights


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 2, "width": 8, "limit": 9, "count": 5, "adaptive": False},
        {"heads": 1, "width": 6, "limit": 7, "count": 1, "adaptive": True},
        {"heads": 4, "width": 12, "limit": 5, "count": 23, "adaptive": True, "layers": 3},
        {"heads": 3, "width": 12, "limit": 5, "count": 23, "adaptive": False, "layers": 1},
    ],
)
def test_other_all_attention_checkpoints_there_and_back(sizes, options, tmp_path):
    source, run, back = tmp_path / "source.pt", tmp_path / "run", tmp_path / "back.pt"
    weights = synthetic(source, **sizes)
    assert import_torch(source, run, FIELDS, options) == 0
    config = Config.from_dict(json.loads((run / "config.json").read_text()))
    found = config.model.heads, config.model.width, config.span.limit, config.model.persistent, config.span.kind
    kind = "adaptive" if sizes["adaptive"] else "fixed"
    assert found == (*(sizes[name] for name in ("heads", "width", "limit", "count")), kind)
    layer = adaptive_span_jax.load(run).decoder.weights["layers"][0]["attention"]
    for ours, theirs in (("key_HKU", "key"), ("value_HUK", "val")):
        assert_array_equal(layer["persistent"][ours], weights[f"module.layers.0.attn.attn.persistent_memory.{theirs}"])
    assert export_torch(back, run, "latest") == 0
    same(torch.load(back, weights_only=True), torch.load(source, weights_only=True))


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
            "another kind of model. Unknown: layers.0.ff.fc1.bias",
        ),
        (
            lambda c: c["model"].update(
                {"module.layers.0.attn.attn.persistent_memory.adaptive_span._mask.current_val": torch.zeros(4, 1, 1)}
            ),
            "that differs from the one of the same layer's attention",
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
