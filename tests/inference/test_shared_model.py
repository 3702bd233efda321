"""A run without what only training needs: it can be used like the run itself, but not resumed."""

import json
import math

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import adaptive_span_jax
from adaptive_span_jax.commands import evaluate, export_weights, train, verify
from adaptive_span_jax.commands import report as report_command
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.report import probe, report
from adaptive_span_jax.report.figures.spans import spans_by_layer
from tests.conftest import use_devices
from tests.inference.conftest import CONFIG, TEXT

pytestmark = pytest.mark.xdist_group("finished")  # one run serves all files of this folder


@pytest.fixture(scope="module")
def shared(run, tmp_path_factory):
    """The run's model as it would be shared."""
    target = tmp_path_factory.mktemp("shared") / "model"
    assert export_weights.export_weights(run, "latest", target) == 0
    return target


def test_a_shared_model_is_the_same_model_without_optimizer_and_memory(model, shared):
    (checkpoint,) = (shared / "checkpoints").iterdir()
    assert [path.name for path in checkpoint.iterdir() if (path / "manifest.ocdbt").exists()] == ["params"]
    copy = adaptive_span_jax.load(shared)
    assert (copy.hash, copy.step) == (model.hash, 60)
    assert_array_equal(copy.logprobs(TEXT), model.logprobs(TEXT))
    assert verify.verify(shared) == 0
    assert json.loads((shared / "result.json").read_text())["steps"] == 60
    assert json.loads((shared / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 60


def test_paths_of_the_machine_are_not_shared(run, shared, tmp_path, monkeypatch):
    local = CONFIG.changed({"data.directory": "/home/me", "init_from": "runs/secret"})
    load = export_weights.load_params

    def load_local(*arguments):
        _, saved, params = load(*arguments)
        return local, saved, params

    monkeypatch.setattr(export_weights, "load_params", load_local)
    assert export_weights.export_weights(run, "latest", tmp_path / "model") == 0
    for file in ("config.json", "checkpoints/60/_CHECKPOINT_METADATA"):
        text = (tmp_path / "model" / file).read_text()
        assert "stdlib" in text
        assert "/home/me" not in text
        assert "secret" not in text


def test_a_shared_model_cannot_be_resumed_but_started_from(shared, tmp_path, monkeypatch, no_report):
    use_devices(monkeypatch, 1)
    longer = CONFIG.changed({"train.steps": 61})
    with pytest.raises(UserError, match=r"has no memory and no optimizer, so it cannot be resumed.*init_from"):
        train.train(longer, shared, "command")
    new = CONFIG.changed({"init_from": str(shared), "train.steps": 1, "evaluate.max_tokens": 50})
    assert train.train(new, tmp_path / "new", "command") == 0


def test_nothing_is_overwritten(run, shared):
    with pytest.raises(UserError, match="already has checkpoints; choose another directory"):
        export_weights.export_weights(run, "latest", shared)


def test_any_file_can_be_scored(model, shared, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "load", lambda *_: model)
    file = tmp_path / "text.py"
    file.write_bytes(TEXT)
    assert evaluate.evaluate_file(shared, "latest", file) == 0
    bits = -model.logprobs(TEXT).mean() / math.log(2)
    assert f"{bits:.4f} bits per byte" in capsys.readouterr().out
    file.write_bytes(b"x")
    with pytest.raises(UserError, match="has 1 byte; the first is not scored"):
        evaluate.evaluate_file(shared, "latest", file)


def test_a_report_without_the_text_probes_the_model_on_its_own(shared, monkeypatch):
    monkeypatch.setattr(report_command.corpora, "is_prepared", lambda _: False)
    monkeypatch.setattr(report_command.corpora, "load", lambda _: pytest.fail("the text is not here"))
    monkeypatch.setattr(report, "cost_by_limit", lambda *_: spans_by_layer(np.ones((1, 1)), 5, 37))  # takes long
    sizes = []
    probe_model = probe.probe_model
    monkeypatch.setattr(probe, "probe_model", lambda *given: sizes.append(given[2].dev.size) or probe_model(*given))
    assert report_command.report(shared, "latest") == 0
    page = (shared / "report" / "index.html").read_text()
    assert page.count("text that the model generated") == 2  # below the figure of attention, and below the sample
    assert " dev." not in page
    # In every stream, 8 segments fill the memory of 100 positions and 8 more are measured; the last one has targets.
    assert sizes == [CONFIG.evaluate.batch_size * (16 * CONFIG.train.segment + 1)]
    dev_bits = json.loads((shared / "result.json").read_text())["dev_bits"]
    assert json.loads((shared / "report" / "summary.json").read_text())["dev_bits"] == dev_bits
