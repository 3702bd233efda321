"""The model in models/enwik8_cpu works in a fresh clone: no training, no data."""

import subprocess
import sys
from pathlib import Path

import pytest
from numpy.testing import assert_allclose

import adaptive_span_jax
from adaptive_span_jax.checkpoint import sealing

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "enwik8_cpu"
TEXT = b"""== History ==
The '''city''' was founded in [[1850]] by settlers from [[England]], and its population grew to 20,000 within ten years.
"""

pytestmark = pytest.mark.xdist_group("enwik8_cpu")


@pytest.fixture(scope="module")
def model():
    return adaptive_span_jax.load(MODEL)


def test_log_probability_of_a_fixed_text(model):
    assert_allclose(model.logprobs(TEXT).sum(dtype="float64"), -154.14619, atol=1e-4)


def test_it_continues_a_prompt_with_likely_text(model):
    (text,) = model.generate("== History ==", 100, temperature=0.5, seed=1)
    assert len(text) == 100
    bits = -model.logprobs(b"== History ==" + text)[-100:].mean() / 0.6931
    assert bits < 2.0  # uniform bytes would take 7.7
    assert b" " in text


def test_it_is_small_and_intact():
    (checkpoint,) = (MODEL / "checkpoints").iterdir()
    assert sealing.find_damage(checkpoint) is None
    assert sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file()) < 8_000_000


def test_it_names_no_paths_of_the_machine_that_trained_it(model):
    assert (model.config.data.archive, model.config.data.directory, model.config.init_from) == ("", "", "")


def test_generating_into_a_closed_pipe_is_no_traceback():
    """As in `python main.py --mode=generate … | head -1`."""
    command = [sys.executable, "main.py", "--mode=generate", f"--workdir={MODEL}", "--prompt=== History ==\n"]
    command.append("--config.generate.length=100")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line == "== History ==\n" for line in process.stdout)
        process.stdout.close()
        assert "BrokenPipeError" not in process.stderr.read()
    assert process.returncode == 1
