"""The score of a text by a trained run is the same in every way of computing it."""

import dataclasses
import json
import sys
from typing import Any, cast

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose

import adaptive_span_jax
from adaptive_span_jax.checkpoint.metadata import CheckpointMetadata
from adaptive_span_jax.commands import evaluate
from adaptive_span_jax.commands import report as report_command
from adaptive_span_jax.data import corpus
from adaptive_span_jax.data.segments import Position
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.inference.loaded_model import LoadedModel
from adaptive_span_jax.inference.scoring import make_decoder_step, score_with_cache
from adaptive_span_jax.interop import convert
from adaptive_span_jax.model import flops
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training import step
from adaptive_span_jax.training.evaluation import score
from tests.conftest import random_params, tiny_config, use_devices
from tests.inference.conftest import CONFIG, TEXT

pytestmark = pytest.mark.xdist_group("finished")  # one run serves all files of this folder


def test_scores_are_what_the_model_in_training_gives(model):
    mesh = sharding.make_mesh(jax.devices()[:1])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *model.decoder.weights["layers"])
    params, ids = model.decoder.weights | {"layers": stacked}, model.encode(TEXT)
    eval_step, decoder_step = step.make_eval_step(CONFIG, mesh), cast(Any, make_decoder_step(model.decoder, mesh))
    for protocol in ("published", "exact"):
        expected = score(CONFIG, params, ids, protocol, eval_step, mesh)
        found = score_with_cache(model.decoder, ids, protocol, decoder_step, mesh)
        assert_allclose(found.nats, expected.nats, atol=1e-5)
        assert_allclose(found.z_LH, expected.z_LH, rtol=1e-6)
        assert found.tokens == expected.tokens
    assert decoder_step._cache_size() == 1


def test_logprobs_and_spans_are_what_evaluation_gives(model):
    mesh = sharding.make_mesh(jax.devices()[:1])
    step = make_decoder_step(model.decoder, mesh)
    expected = score_with_cache(model.decoder, model.encode(TEXT), "exact", step, mesh)
    # Two streams, each from empty memory, as the exact protocol cuts them.
    halves = [model.logprobs(half) for half in (TEXT[: len(TEXT) // 2 + 1], TEXT[len(TEXT) // 2 :])]
    assert [half.size for half in halves] == [len(TEXT) // 2, (len(TEXT) - 1) // 2]
    assert_allclose(-np.concatenate(halves).mean(dtype=np.float64), expected.nats, atol=1e-5)
    assert model.logprobs(TEXT[:1]).shape == (0,)
    assert_allclose(model.spans(), np.minimum(expected.z_LH + CONFIG.span.ramp, CONFIG.span.limit), rtol=1e-6)


def test_dynamic_spans_are_averaged_over_the_scored_tokens_and_nothing_else(tmp_path):
    """Padding at the end of streams and segments counts nowhere, and every way to ask gives one number."""
    mesh = sharding.make_mesh(jax.devices()[:1])
    found = []
    for streams, segment in ((1, 100), (1, 13), (2, 50), (2, 13)):  # 100 targets; segments of 13 leave padding
        config = tiny_config(
            span={"kind": "dynamic", "limit": 90},
            model={"layers": 2, "attention": "plain"},
            train={"segment": segment},
            evaluate={"batch_size": streams},
        )
        params = random_params(config, 11)
        # Padding repeats the last tokens, or is token 0, so that either would move the average.
        ids = np.r_[np.random.default_rng(1).integers(1, 10, 100), 10].astype(np.uint8)
        decoder = CachedDecoder.of(config, params)
        found += [
            score(config, params, ids, "exact", step.make_eval_step(config, mesh), mesh).z_LH,
            score_with_cache(decoder, ids, "exact", make_decoder_step(decoder, mesh), mesh).z_LH,
        ]
        if streams == 1:
            saved = CheckpointMetadata(0, Position(), 0.0, "", "".join(map(chr, range(97, 108))), {})
            text = bytes(97 + ids)
            model = LoadedModel(config, saved, params, mesh)
            assert_allclose(model.spans(text), np.minimum(found[0] + config.span.ramp, 90), rtol=1e-4)
    assert np.ptp(found[0]) > 1
    for one, other in ((0, 1), (0, 2), (0, 3), (4, 5), (4, 6), (4, 7)):
        assert_allclose(found[other], found[one], rtol=1e-4)


@pytest.mark.parametrize("streams", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
def test_exact_scores_do_not_depend_on_how_the_text_is_cut(model, streams):
    """Every target once, each stream from empty memory: the segment's length changes nothing, streams only that."""
    mesh, ids = sharding.make_mesh(jax.devices()[:1]), model.encode(TEXT)
    length = -(-(ids.size - 1) // streams)
    pieces = [model.logprobs(TEXT[start : start + length + 1]) for start in range(0, ids.size - 1, length)]
    expected = -np.concatenate(pieces).mean(dtype=np.float64)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *model.decoder.weights["layers"])
    params = model.decoder.weights | {"layers": stacked}
    for segment in (7, 13, 64):
        config = dataclasses.replace(
            CONFIG,
            train=dataclasses.replace(CONFIG.train, segment=segment),
            evaluate=dataclasses.replace(CONFIG.evaluate, batch_size=streams),
        )
        decoder = dataclasses.replace(model.decoder, config=config)
        found = [
            score(config, params, ids, "exact", step.make_eval_step(config, mesh), mesh),
            score_with_cache(decoder, ids, "exact", make_decoder_step(decoder, mesh), mesh),
        ]
        assert [each.tokens for each in found] == [ids.size - 1] * 2
        assert_allclose([each.nats for each in found], expected, atol=1e-5)


def test_any_checkpoint_can_be_evaluated(run, monkeypatch, capsys):
    use_devices(monkeypatch, 1)
    results = {}
    # The checkpoint knows its model, its text and how to evaluate; the command may change the latter.
    for which in ("30", "best"):
        assert evaluate.evaluate(run, which, {"evaluate.batch_size": 2}) == 0
        results[which] = json.loads((run / "evaluation.json").read_text())
    assert results["30"]["step"] == 30
    assert results["best"]["step"] == 60
    assert results["best"]["dev_exact"]["bits"] < results["30"]["dev_exact"]["bits"]
    printed = capsys.readouterr().out
    for name in ("dev_published", "dev_exact", "test_published", "test_exact"):
        found = results["best"][name]
        assert found["perplexity"] == pytest.approx(2 ** found["bits"])
        assert found["tokens"] > 0 < found["tokens_per_second"]
        assert f"{name.replace('_', ', ')}" in printed
        assert (
            f"{found['bits']:.4f} bits per byte, perplexity {found['perplexity']:.3f}, {found['tokens']:,} tokens"
            in printed
        )
    for name in ("dev_exact", "test_exact"):
        assert results["best"][name]["flops_per_token"] == flops.paper_flops(
            CONFIG, results["best"][name]["average_span"]
        )
    assert f"{results['best']['test_exact']['average_span']:.1f} positions" in printed
    with pytest.raises(UserError, match=r"no checkpoint '7'; use a step, latest or best. Available: 30, 60 \(best\)"):
        evaluate.evaluate(run, "7")


def test_load_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="has no checkpoints; pass the workdir of a run"):
        adaptive_span_jax.load(tmp_path)


def test_convert_says_what_it_needs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r'PyTorch is required.* pip install "\.\[torch\]"'):
        convert.from_torch(tmp_path / "checkpoint.pt", tmp_path / "run", None, {})


@pytest.mark.parametrize("mode", [evaluate.evaluate, report_command.report])
def test_where_data_is_kept_is_the_runs_own_unless_changed(mode, run, monkeypatch):
    """So are all other settings of the run; the command line's config file does not reach these modes."""
    seen = []

    def load(data):
        seen.append(data)
        raise UserError("seen enough")

    use_devices(monkeypatch, 1)
    monkeypatch.setattr(corpus, "load", load)
    for changes in (None, {"data.directory": "/elsewhere"}):
        with pytest.raises(UserError, match="seen enough"):
            mode(run, "latest", changes)
    assert seen == [CONFIG.data, dataclasses.replace(CONFIG.data, directory="/elsewhere")]
