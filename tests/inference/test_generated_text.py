"""Generated text: its probability, its cost, how it is printed; it never crashes."""

import io
import sys

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.commands import generate
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference import sampling
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.model.transformer import init
from adaptive_span_jax.runtime import sharding
from tests.conftest import tiny_config
from tests.inference.conftest import TEXT

pytestmark = pytest.mark.xdist_group("finished")  # one run serves all files of this folder


def how(**fields):
    return {f"generate.{name}": value for name, value in ({"length": 30, "seed": 1} | fields).items()}


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
        decoder = CachedDecoder.of(config, params)
        cache = decoder.empty_cache(1, sharding.make_mesh(jax.devices()[:1]))
        one = jax.jit(decoder.read).lower(decoder.weights, np.zeros((1, 1), np.int32), cache)
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
    assert generate.generate(run, "latest", "def ", None, how(samples=2)) == 0
    printed, messages = capsys.readouterr()
    first, second = model.generate(b"def ", 30, samples=2, seed=1)
    assert printed == f"def {first.decode()}\n\n--- sample 2 of 2 ---\ndef {second.decode()}\n"
    assert "reading the prompt" in messages
    assert "30 after a prompt of 4; 2 samples" in messages
    # A vocabulary without any text in it: every symbol is shown, none is fatal.
    monkeypatch.setattr(model, "vocabulary", tuple(bytes([128 + i]) for i in range(len(model.vocabulary))))
    (run / "prompt").write_bytes(b"\x80\xc3\xa4")
    assert generate.generate(run, "latest", None, str(run / "prompt"), how(samples=2)) == 0
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
    assert generate.generate(run, "latest", "def ", None, how()) == 0
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
        generate.generate(run, "latest", prompt, file, how())
