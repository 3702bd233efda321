"""A trained run as an object and on the command line: its numbers agree with each other, its text never crashes."""

import dataclasses
import io
import json
import math
import sys
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import adaptive_span_jax
from adaptive_span_jax import compress, convert, evaluate, flops, generate, report, sampling, sharding, step, train
from adaptive_span_jax.config import GenerateConfig
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.finished_model import FinishedModel
from adaptive_span_jax.model import init
from adaptive_span_jax.score import make_finished_step, score, score_finished
from tests.conftest import tiny_config, use_devices

pytestmark = pytest.mark.xdist_group("trained_model")  # one run serves all
HEADER_AND_TRAILER = 44  # bytes
TEXT = b"import sys\n\n\ndef main():\n    return sys.argv\n" * 7


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has trained for a moment."""
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        use_devices(patch, 1)
        patch.setattr(report, "write_report", lambda *_: None)
        assert train.train(CONFIG, directory, "command") == 0
    return directory


CONFIG = tiny_config(train={"steps": 60}, evaluate={"every_steps": 30}, span={"limit": 100}, model={"layers": 2})


@pytest.fixture(scope="module")
def model(run):
    return adaptive_span_jax.load(run)


@pytest.fixture
def loaded(model, monkeypatch):
    """Commands find the model already in memory, with what is compiled of it."""
    for command in (generate, compress):
        monkeypatch.setattr(command, "load", lambda *_: model)
    return model


def how(**fields):
    return dataclasses.replace(
        GenerateConfig(length=30, samples=1, temperature=1.0, top_k=0, top_p=1.0, seed=1), **fields
    )


def test_scores_are_what_the_model_in_training_gives(model):
    mesh = sharding.make_mesh(jax.devices()[:1])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *model.finished.weights["layers"])
    params, ids = model.finished.weights | {"layers": stacked}, model.encode(TEXT)
    eval_step, finished_step = step.make_eval_step(CONFIG, mesh), cast(Any, make_finished_step(model.finished, mesh))
    for protocol in ("published", "exact"):
        expected = score(CONFIG, params, ids, protocol, eval_step, mesh)
        found = score_finished(model.finished, ids, protocol, finished_step, mesh)
        assert_allclose(found.nats, expected.nats, atol=1e-5)
        assert_allclose(found.z_LH, expected.z_LH, rtol=1e-6)
        assert found.tokens == expected.tokens
    assert finished_step._cache_size() == 1


def test_logprobs_and_spans_are_what_evaluation_gives(model):
    mesh = sharding.make_mesh(jax.devices()[:1])
    step = make_finished_step(model.finished, mesh)
    expected = score_finished(model.finished, model.encode(TEXT), "exact", step, mesh)
    # Two streams, each from empty memory, as the exact protocol cuts them.
    halves = [model.logprobs(half) for half in (TEXT[: len(TEXT) // 2 + 1], TEXT[len(TEXT) // 2 :])]
    assert [half.size for half in halves] == [len(TEXT) // 2, (len(TEXT) - 1) // 2]
    assert_allclose(-np.concatenate(halves).mean(dtype=np.float64), expected.nats, atol=1e-5)
    assert model.logprobs(TEXT[:1]).shape == (0,)
    assert_allclose(model.spans(), np.minimum(expected.z_LH + CONFIG.span.ramp, CONFIG.span.limit), rtol=1e-6)


@pytest.mark.parametrize("streams", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
def test_exact_scores_do_not_depend_on_how_the_text_is_cut(model, streams):
    """Every target once, each stream from empty memory: the segment's length changes nothing, streams only that."""
    mesh, ids = sharding.make_mesh(jax.devices()[:1]), model.encode(TEXT)
    length = -(-(ids.size - 1) // streams)
    pieces = [model.logprobs(TEXT[start : start + length + 1]) for start in range(0, ids.size - 1, length)]
    expected = -np.concatenate(pieces).mean(dtype=np.float64)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *model.finished.weights["layers"])
    params = model.finished.weights | {"layers": stacked}
    for segment in (7, 13, 64):
        config = dataclasses.replace(
            CONFIG,
            train=dataclasses.replace(CONFIG.train, segment=segment),
            evaluate=dataclasses.replace(CONFIG.evaluate, streams=streams),
        )
        finished = dataclasses.replace(model.finished, config=config)
        found = [
            score(config, params, ids, "exact", step.make_eval_step(config, mesh), mesh),
            score_finished(finished, ids, "exact", make_finished_step(finished, mesh), mesh),
        ]
        assert [each.tokens for each in found] == [ids.size - 1] * 2
        assert_allclose([each.nats for each in found], expected, atol=1e-5)


def test_generated_text_has_the_probability_that_evaluation_gives_it(model):
    compiled = model._read._cache_size(), model._advance._cache_size()
    for prompt in (TEXT[:1], TEXT[:64], TEXT[:201]):
        steps = list(model.continuation(prompt, 90, 2, sampling.Sampling(), seed=3))
        tokens, logprobs = (np.array(each) for each in zip(*steps, strict=True))
        assert (tokens[:, 0] != tokens[:, 1]).any()
        for sample in range(2):
            text = prompt + model.decode(tokens[:, sample])
            assert_allclose(logprobs[:, sample], model.logprobs(text)[len(prompt) - 1 :], atol=1e-5)
    # One compilation for chunks and one for single tokens, whatever the prompt.
    assert model._read._cache_size() <= compiled[0] + 1
    assert model._advance._cache_size() <= compiled[1] + 1


def test_memory_does_not_grow_with_the_text(model):
    """The arrays on the devices are as many, and as large, after many symbols as after few."""

    def held(length):
        for _ in model.continuation(TEXT[:9], length, 1, sampling.Sampling(), seed=1):
            pass
        return sum(array.nbytes for array in jax.live_arrays())

    def on_the_way(length):
        steps = model.continuation(TEXT[:9], length, 1, sampling.Sampling(), seed=1)
        sizes = [sum(array.nbytes for array in jax.live_arrays()) for _ in steps]
        return max(sizes[3 : length // 2]), max(sizes[length // 2 : -3])

    held(4)  # compiled, and what is kept of it is there
    assert held(4) == held(150)
    early, late = on_the_way(300)
    assert late == early


def test_a_symbol_costs_what_the_spans_cost_not_what_the_limit_is():
    def cost(limit):
        config = tiny_config(span={"limit": limit}, model={"layers": 2})
        params = model_of(config)
        finished = FinishedModel.of(config, params)
        cache = finished.empty_cache(1, sharding.make_mesh(jax.devices()[:1]))
        one = jax.jit(finished.read).lower(finished.weights, np.zeros((1, 1), np.int32), cache)
        analysis = one.compile().cost_analysis()
        assert analysis
        return analysis["flops"], sum(leaf.nbytes for leaf in jax.tree.leaves(cache))

    def model_of(config):
        params = init(config, 11, jax.random.key(0))
        fraction = np.array([[3.0, 40.0], [0.0, 20.0]], np.float32) / config.span.limit
        params["layers"]["attention"]["span"]["span_fraction_H"] = fraction
        return params

    assert cost(200) == cost(6000)


def test_the_same_seed_gives_the_same_text(model):
    assert model.generate(TEXT, 40, samples=2, seed=5) == model.generate(TEXT, 40, samples=2, seed=5)
    assert model.generate(TEXT, 40, samples=2, seed=5) != model.generate(TEXT, 40, samples=2, seed=6)
    greedy = model.generate(TEXT, 40, samples=2, temperature=0.0)
    assert greedy[0] == greedy[1] == model.generate(TEXT, 40, samples=2, top_k=1)[0]


def test_sampling_stays_within_top_k_and_top_p():
    share = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
    logits = np.tile(np.log(share, dtype=np.float32), (4000, 1))

    def drawn(**fields):
        token_B = sampling.sample(logits, jax.random.key(0), sampling.Sampling(**fields))
        return np.bincount(token_B, minlength=5) / len(logits)

    assert_allclose(drawn(), share, atol=0.03)
    assert_allclose(drawn(top_k=2), [0, 4 / 7, 0, 3 / 7, 0], atol=0.03)
    # 0.4 and 0.3 are not yet 0.75, so 0.15 belongs to it as well.
    assert_allclose(drawn(top_p=0.75), np.array([0, 0.4, 0, 0.3, 0.15]) / 0.85, atol=0.03)
    assert_allclose(drawn(temperature=0.5), share**2 / (share**2).sum(), atol=0.03)
    assert_array_equal(drawn(temperature=0.0), [0, 1, 0, 0, 0])


def test_generate_shows_the_text_and_survives_any_bytes(loaded, run, capsys, monkeypatch):
    model = loaded
    assert generate.generate(how(samples=2), run, "latest", "def ", None) == 0
    printed = capsys.readouterr().out
    first, second = model.generate(b"def ", 30, samples=2, seed=1)
    assert ("def " + first.decode()) in printed
    assert ("def " + second.decode()) in printed
    # A vocabulary without any text in it: every symbol is shown, none is fatal.
    monkeypatch.setattr(model, "vocabulary", tuple(bytes([128 + i]) for i in range(len(model.vocabulary))))
    (run / "prompt").write_bytes(b"\x80\xc3\xa4")
    assert generate.generate(how(samples=2), run, "latest", None, str(run / "prompt")) == 0
    assert "\ufffd" in capsys.readouterr().out


class Watched(io.StringIO):
    """A terminal that notes how much it has shown each time it is told to show what it has."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def flush(self):
        self.shown.append(len(self.getvalue()))


def test_text_is_shown_symbol_by_symbol(loaded, run, monkeypatch):
    screen = Watched()
    monkeypatch.setattr(sys, "stdout", screen)
    assert generate.generate(how(), run, "latest", "def ", None) == 0
    start = screen.getvalue().index("def ") + len("def ")
    assert [each for each in screen.shown if each > start][:30] == [start + number for number in range(1, 31)]


@pytest.mark.parametrize(
    ("prompt", "file", "expected"),
    [
        (None, None, "either --prompt"),
        ("a", "b", "either --prompt"),
        ("", None, "the prompt is empty"),
        ("\udcff", None, r"The symbol b'\\xff' at byte 0 is not among"),
        (None, "/no/where", "--prompt_file=/no/where cannot be read"),
    ],
)
def test_bad_prompts_are_named(loaded, run, prompt, file, expected):
    with pytest.raises(UserError, match=expected):
        generate.generate(how(), run, "latest", prompt, file)


def test_any_checkpoint_can_be_evaluated(run, monkeypatch, capsys):
    use_devices(monkeypatch, 1)
    results = {}
    # The checkpoint knows its model and text; how to evaluate is the command's.
    other = tiny_config(model={"width": 30}, data={"max_bytes": 5}, evaluate={"streams": 2})
    for which in ("30", "best"):
        assert evaluate.evaluate(other, run, which) == 0
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
    with pytest.raises(UserError, match=r"no checkpoint '7'; name a step, latest or best. There are: 30, 60 \(best\)"):
        evaluate.evaluate(CONFIG, run, "7")


def test_load_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="has no checkpoints; name the workdir of a run"):
        adaptive_span_jax.load(tmp_path)


def test_convert_says_what_it_needs(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert convert.main(["checkpoint.pt", f"--workdir={tmp_path}"]) == 2
    assert "error: PyTorch is needed" in (printed := capsys.readouterr().err)
    assert "pip install -r requirements-convert.txt" in printed


def streamed_bits(model, text, streams):
    """What the model says that a text costs, cut as the compressor cuts it."""
    parts = np.array_split(np.frombuffer(text, np.uint8), streams)
    return sum(8 - model.logprobs(part.tobytes()).sum(dtype=np.float64) / math.log(2) for part in parts)


def test_compression_costs_what_the_model_says(model, monkeypatch):
    text = b"".join(TEXT[i:] for i in range(len(TEXT) - 1, 0, -7))[:6001]
    monkeypatch.setattr(compress, "_BYTES_PER_STREAM", 3000)
    packed = compress.pack(model, text)
    assert compress.check(packed, "it").streams == 2
    assert_allclose(8 * (len(packed) - HEADER_AND_TRAILER), streamed_bits(model, text, 2), rtol=0.01)
    assert packed == compress.pack(model, text)
    assert compress.unpack(model, packed, "it") == text


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"d",
        b"\xff",
        TEXT[:100] + b"\x00\xfe" + TEXT[:30] + b"\xff\xff",
        np.random.default_rng(0).bytes(300),
        bytes(200) + TEXT,
    ],
    ids=["empty", "one", "one unknown", "some unknown", "random", "many unknown"],
)
def test_any_bytes_come_back(model, text):
    packed = compress.pack(model, text)
    assert len(packed) <= len(text) + HEADER_AND_TRAILER
    assert compress.unpack(model, packed, "it") == text


def test_damage_and_other_models_are_refused(model, run):
    packed = compress.pack(model, TEXT)
    for place in (0, 6, 7, 20, 30, 40, 60, len(packed) - 1):
        damaged = bytearray(packed)
        damaged[place] ^= 4
        with pytest.raises(UserError, match=r"it (is damaged|is not a file|has format)"):
            compress.unpack(model, bytes(damaged), "it")
    with pytest.raises(UserError, match="it is damaged"):
        compress.unpack(model, packed[:-9], "it")
    with pytest.raises(UserError, match=r"compressed by the model \w+, this one is \w+ \(step 30\)"):
        compress.unpack(adaptive_span_jax.load(run, 30), packed, "it")


def test_files_are_compressed_and_restored(loaded, run, tmp_path, capsys):
    source = tmp_path / "text"
    source.write_bytes(TEXT)
    assert compress.compress(run, "latest", source, None) == 0
    with pytest.raises(UserError, match="text exists and is not overwritten"):
        compress.decompress(run, "latest", tmp_path / "text.adspan", None)
    with pytest.raises(UserError, match="adspan exists and is not overwritten"):
        compress.compress(run, "latest", source, None)
    assert compress.decompress(run, "latest", tmp_path / "text.adspan", tmp_path / "again") == 0
    assert (tmp_path / "again").read_bytes() == TEXT
    assert "bits per byte" in capsys.readouterr().out
    with pytest.raises(UserError, match="--input=nowhere cannot be read"):
        compress.compress(run, "latest", Path("nowhere"), None)
