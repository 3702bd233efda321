"""The experiment of benchmarks/lags.py: its text, its closed form, and, slowly, what its runs show."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import adaptive_span_jax
from benchmarks import lags

TEXT = lags.Text(spacing=8, first=1, last=12, stretch=1 / 16, power=1.0)


def records(count: int) -> np.ndarray:
    return np.frombuffer(TEXT.make(count), np.uint8).reshape(-1, 2)


def test_every_copy_comes_from_where_its_record_says():
    text_N2 = records(5000)
    source_N = 2 * np.arange(100, 5000) - TEXT.distance_J[text_N2[100:, 0]]
    np.testing.assert_array_equal(text_N2[100:, 1] - 128, text_N2.reshape(-1)[source_N])


@pytest.mark.parametrize(("power", "first_to_fourth"), [(1.0, 4), (0.5, 2)])
def test_distances_are_as_frequent_as_they_should_be(power, first_to_fourth):
    text = TEXT._replace(power=power)
    first_N = np.frombuffer(text.make(200_000), np.uint8)[::2]
    found_J = np.bincount(first_N) / 200_000
    assert_allclose(found_J, text.probability_J, atol=0.005)
    assert_allclose(found_J[0] / found_J[3], first_to_fourth, rtol=0.05)


def test_distances():
    np.testing.assert_array_equal(TEXT.distance_J[[0, 1, 3, 11]], [8, 18, 40, 168])  # 8·j·(1 + j/16)
    for text, furthest in ((lags.FAR, 1024), (lags.HALF, 512)):
        assert text.distance_J[-1] == furthest
        assert len(set(text.distance_J)) == 64
    assert (lags.GAP.distance_J[0], lags.GAP.distance_J[-1]) == (256, 312)


def test_entropy_against_counts():
    """With a span of 40, a copy is known if it comes from at most 40 back, else it is any f."""
    first_N = records(200_000)[:, 0]
    found_J = np.bincount(first_N) / 200_000
    bits = -(found_J * np.log2(found_J)).sum()
    unseen = (TEXT.distance_J[first_N] > 40).mean()
    assert_allclose(TEXT.entropy(40), (bits + unseen * bits) / 2, rtol=0.005)
    assert_allclose(TEXT.entropy(), bits / 2, rtol=0.005)
    assert_allclose(TEXT.entropy(7), bits, rtol=0.005)


def test_bits_of_copies_by_distance(tmp_path, monkeypatch):
    class KnowsNear:
        """Copies from up to 40 back cost nothing, others 3 bits; the first symbols of records cost 7."""

        def logprobs(self, text: bytes, show: Callable) -> np.ndarray:
            first_N = np.frombuffer(text, np.uint8)[::2]
            bits_N2 = np.stack([np.full(first_N.size, 7), np.where(TEXT.distance_J[first_N] <= 40, 0, 3)], axis=1)
            return -math.log(2) * bits_N2.reshape(-1)[1:]

    monkeypatch.setattr(adaptive_span_jax, "load", lambda workdir: KnowsNear())
    bits_J = lags.copy_bits(TEXT, tmp_path / "run")
    assert_allclose(bits_J, np.where(TEXT.distance_J <= 40, 0, 3))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lags")


@pytest.fixture(scope="module")
def results(workdir) -> dict[str, dict[str, Any]]:
    """The runs of docs/lags.md: minutes each."""
    return {name: lags.train(run, workdir / name) for name, run in lags.RUNS.items()}


@pytest.fixture(scope="module")
def known(workdir, results) -> dict[str, np.ndarray]:
    """Which copies each run's model knows, by distance."""
    return {name: lags.copy_bits(run.text, workdir / name) < lags.KNOWN_BITS for name, run in lags.RUNS.items()}


@pytest.mark.slow
def test_spans_go_as_far_as_they_must(results, known):
    longest = {name: result["longest_span"] for name, result in results.items()}
    # One head covers the largest distance and hardly more; the heads of the other layer stay near the ramp of 64.
    for name, furthest in (("far", 1024), ("half", 512)):
        assert furthest <= longest[name] <= 1.1 * furthest
        assert min(np.max(results[name]["z_LH"], axis=1)) < 32
        assert known[name].sum() >= 61
    assert sorted(np.ravel(results["half"]["z_LH"]))[-2] < 64
    # With ten times the penalty, and with a fixed span that is too short, only what is near is known.
    assert longest["penalty"] < longest["far"] / 2
    for name in ("penalty", "fixed"):
        assert 5 <= known[name].sum() <= (lags.FAR.distance_J <= longest[name]).sum()
    # From z = 0, heads do not find what is only far beyond the ramp.
    assert longest["gap"] < 256
    assert not known["gap"].any()
    assert longest["gap_initial"] >= 312
    assert known["gap_initial"].all()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(lags.RUNS) - {"gap"}))  # this one gains something from nearer copies
def test_bits_are_those_of_the_copies_that_are_known(name, results, known):
    expected = lags.RUNS[name].text.bits(known[name])
    assert -0.02 < results[name]["dev_bits"] - expected < 0.05
