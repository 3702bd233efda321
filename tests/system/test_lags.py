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

TEXT = lags.Text(spacing=10, first=1, last=12)


def records(count: int) -> np.ndarray:
    """The records, with symbols counted from 0: content, marker, copy."""
    return np.frombuffer(TEXT.make(count), np.uint8).reshape(-1, 3) - np.array([0, lags.MARKERS, lags.COPIES], np.uint8)


def test_every_copy_comes_from_where_its_marker_says():
    symbol_N3 = records(5000)
    marker_position_N = 3 * np.arange(100, 5000) + 1
    source_N = marker_position_N - TEXT.distance_J[symbol_N3[100:, 1]]
    assert set(source_N % 3) == {0}
    np.testing.assert_array_equal(symbol_N3[100:, 2], symbol_N3.reshape(-1)[source_N])


def test_symbols_are_as_frequent_as_they_should_be():
    symbol_N3 = records(200_000)
    found_J = np.bincount(symbol_N3[:, 1]) / 200_000
    assert_allclose(found_J, TEXT.probability_J, atol=0.005)
    assert_allclose(found_J[0] / found_J[3], 2, rtol=0.05)
    for each in (0, 2):
        assert_allclose(np.bincount(symbol_N3[:, each]) / 200_000, np.full(lags.CONTENTS, 1 / 8), atol=0.005)


def test_distances():
    # 10, 20, 40, 120, to the nearest 3·k + 1
    np.testing.assert_array_equal(TEXT.distance_J[[0, 1, 3, 11]], [10, 19, 40, 121])
    for text, nearest, furthest in ((lags.FAR, 31, 1024), (lags.HALF, 16, 511)):
        assert (text.distance_J[0], text.distance_J[-1]) == (nearest, furthest)
        assert len(set(text.distance_J)) == 32
    assert (lags.GAP.distance_J[0], lags.GAP.distance_J[-1]) == (511, 568)


def test_entropy_against_counts():
    """With a span of 40, a copy is known if it comes from at most 40 back, else it is any symbol."""
    symbol_N3 = records(200_000)
    content_bits, marker_bits, copy_bits = (entropy_of(symbol_N3[:, each]) for each in range(3))
    unseen = (TEXT.distance_J[symbol_N3[:, 1]] > 40).mean()
    assert 0.2 < unseen < 0.6
    assert_allclose(TEXT.entropy(40), (content_bits + marker_bits + unseen * copy_bits) / 3, rtol=0.005)
    assert_allclose(TEXT.entropy(), (content_bits + marker_bits) / 3, rtol=0.005)
    assert_allclose(TEXT.entropy(6), (content_bits + marker_bits + copy_bits) / 3, rtol=0.005)


def entropy_of(symbol_N: np.ndarray) -> float:
    """Bits per symbol by its own counts."""
    found = np.bincount(symbol_N) / symbol_N.size
    return float(-(found * np.log2(found)).sum())


def test_bits_of_copies_by_distance(tmp_path, monkeypatch):
    class KnowsNear:
        """Copies from up to 40 back cost nothing, others 3 bits; contents cost 7, markers 9."""

        def logprobs(self, text: bytes, show: Callable) -> np.ndarray:
            marker_N = np.frombuffer(text, np.uint8)[1::3] - lags.MARKERS
            copy_N = np.where(TEXT.distance_J[marker_N] <= 40, 0, 3)
            bits_N3 = np.stack([np.full(copy_N.size, 7), np.full(copy_N.size, 9), copy_N], axis=1)
            return -math.log(2) * bits_N3.reshape(-1)[1:]

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
    # One head covers the largest distance and hardly more, and the others stay near the ramp of 128.
    for name, furthest in (("far", 1024), ("far_2", 1024), ("far_3", 1024), ("half", 511)):
        assert furthest - 1 < longest[name] <= 1.1 * furthest
        assert np.sort(results[name]["z_LH"], axis=None)[-2] < 128
        assert known[name].all()
    # With ten times the penalty, a smaller limit, a short ramp or a fixed span that is too short: only what is near.
    for name in ("penalty", "limit", "ramp", "fixed"):
        assert longest[name] < 900
        assert 0 < known[name].sum() < 32
    # From z = 0, heads do not find what is only far beyond the ramp.
    assert longest["gap"] < 511
    assert not known["gap"].any()
    assert longest["gap_initial"] > 567
    assert known["gap_initial"].all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["penalty", "limit", "ramp", "fixed", "gap"])
def test_what_is_known_is_within_the_longest_span(name, results, known):
    masked = lags.RUNS[name].text.distance_J >= results[name]["longest_span"] + 1  # the mask is 0 from z + R + 1
    assert not known[name][masked].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", lags.RUNS)
def test_bits_are_those_of_the_copies_that_are_known(name, results, known):
    expected = lags.RUNS[name].text.bits(known[name])
    # With a narrow range of distances, the sources of two copies are often the same: what is near tells a little.
    below = 0.2 if name == "gap" else 0.02
    assert -below < results[name]["dev_bits"] - expected < 0.02
