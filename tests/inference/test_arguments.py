"""The Python API validates arguments by the rules of the command line, and names the argument."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import adaptive_span_jax
from adaptive_span_jax import cli
from adaptive_span_jax.checkpoint.manager import Checkpoints
from adaptive_span_jax.commands import evaluate
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference import sampling
from tests.conftest import tiny_config, use_devices
from tests.inference.conftest import TEXT

pytestmark = pytest.mark.xdist_group("finished")  # one run serves all files of this folder


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"samples": 0}, ValueError, "samples is 0; it must be at least 1"),
        ({"samples": -1}, ValueError, "samples is -1; it must be at least 1"),
        ({"samples": 1.5}, TypeError, "samples is 1.5, a float; it must be a int"),
        ({"samples": 10**12}, ValueError, r"samples = 1000000000000 needs at least .* PiB of memory, this machine has"),
        ({"temperature": -1}, ValueError, "temperature is -1.0; it must be 0 or more"),
        ({"temperature": float("nan")}, ValueError, "temperature is nan"),
        ({"temperature": "hot"}, TypeError, "temperature is 'hot', a str; it must be a float"),
        ({"top_k": -1}, ValueError, "top_k is -1; it must be 0"),
        ({"top_k": 2**40}, ValueError, "top_k is 1099511627776; it must be 0"),
        ({"top_p": 0}, ValueError, "top_p is 0.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, ValueError, "top_p is 1.1"),
        ({"length": -5}, ValueError, "length is -5; it must be at least 1"),
        ({"length": "9"}, TypeError, "length is '9', a str"),
        ({"seed": -1}, ValueError, "seed is -1; it must be between 0"),
        ({"seed": 0.5}, TypeError, "seed is 0.5, a float; it must be a int"),
        ({"seed": True}, TypeError, "seed is True, a bool; it must be a int"),
        ({"prompt": 123}, TypeError, "prompt is of type int; it must be bytes or str"),
        ({"prompt": None}, TypeError, "prompt is of type NoneType"),
        ({"prompt": b""}, ValueError, "the prompt is empty"),
    ],
)
def test_arguments_of_generate(model, arguments: dict[str, Any], error, message):
    with pytest.raises(error, match=message):
        model.generate(**{"prompt": TEXT, "length": 2} | arguments)


def test_continuation_says_at_once_what_is_wrong(model):
    with pytest.raises(ValueError, match="top_k is -1"):
        model.continuation(TEXT, 3, 1, sampling.Sampling(top_k=-1), 0)


def test_numbers_of_numpy_are_numbers(model):
    numpy = {"samples": np.int64(2), "temperature": np.float32(0.5), "seed": np.uint8(3)}
    assert model.generate(TEXT, np.int32(4), **numpy) == model.generate(TEXT, 4, samples=2, temperature=0.5, seed=3)


def test_texts_are_bytes_or_str(model):
    for call in (model.logprobs, model.spans, model.encode):
        with pytest.raises(TypeError, match="text is of type int; it must be bytes or str"):
            call(123)
    np.testing.assert_array_equal(model.logprobs(bytearray(TEXT)), model.logprobs(TEXT))


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (-3, ValueError, "no checkpoint '-3'; use a step, latest or best"),
        ("newest", ValueError, "no checkpoint 'newest'"),
        (1.5, TypeError, r"step is 1\.5, a float; it must be latest, best or a step number"),
        (None, TypeError, "step is None"),
        (True, TypeError, "step is True"),
    ],
)
def test_wrong_steps(run, step, error, message):
    with pytest.raises(error, match=message):
        adaptive_span_jax.load(run, step)


def test_wrong_workdirs(tmp_path):
    with pytest.raises(ValueError, match="workdir nonexistent does not exist; pass the workdir of a run"):
        adaptive_span_jax.load("nonexistent")
    with pytest.raises(ValueError, match="has no checkpoints; pass the workdir of a run"):
        adaptive_span_jax.load(tmp_path)
    wrong: Any = 5
    with pytest.raises(TypeError, match="workdir is 5, a int; it must be a str or a Path"):
        adaptive_span_jax.load(wrong)


def test_evaluation_refuses_streams_before_it_starts(run, monkeypatch):
    use_devices(monkeypatch, 1)
    monkeypatch.setattr(evaluate, "score_with_cache", lambda *_: pytest.fail("it has begun"))
    with pytest.raises(UserError, match=r"config\.evaluate\.batch_size is 100000, but dev has only 1,000 tokens"):
        evaluate.evaluate(run, "latest", {"evaluate.batch_size": 100_000})


def test_a_float64_model_needs_64_bit_mode_which_only_the_command_line_enables(run, monkeypatch, tmp_path):
    describe, wide = Checkpoints.describe, {"compute_dtype": "float64"}

    def in_float64(self, step):
        saved = describe(self, step)
        return dataclasses.replace(saved, config=saved.config | {"model": saved.config["model"] | wide})

    monkeypatch.setattr(Checkpoints, "describe", in_float64)
    with pytest.raises(UserError, match=r"computes in float64, but JAX is in 32-bit mode; call jax.config.update"):
        adaptive_span_jax.load(run)
    assert jax.dtypes.canonicalize_dtype(np.float64) == np.float32
    try:
        jax.config.update("jax_enable_x64", True)
        assert adaptive_span_jax.load(run).decoder.weights["embedding_VD"].dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", False)

    assert not cli._computes_in_float64(tmp_path)
    (tmp_path / "config.json").write_text(tiny_config(model=wide).to_json())
    assert cli._computes_in_float64(tmp_path)
    (tmp_path / "config.json").write_text("not JSON")
    assert not cli._computes_in_float64(tmp_path)
