"""The experiment of benchmarks/lags.py: its text, its closed form, and, slowly, what its runs show."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from benchmarks import lags

TEXT = lags.Text(spacing=8, first=1, last=12)


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


def test_entropy_against_counts():
    """With a span of 40, a copy is known if it comes from at most 40 back, else it is any f."""
    first_N = records(200_000)[:, 0]
    found_J = np.bincount(first_N) / 200_000
    bits = -(found_J * np.log2(found_J)).sum()
    unseen = (TEXT.distance_J[first_N] > 40).mean()
    assert_allclose(TEXT.entropy(40), (bits + unseen * bits) / 2, rtol=0.005)
    assert_allclose(TEXT.entropy(), bits / 2, rtol=0.005)
    assert_allclose(TEXT.entropy(7), bits, rtol=0.005)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """The runs of docs/lags.md: minutes each."""
    folder: Path = tmp_path_factory.mktemp("lags")
    return {name: lags.train(run, folder / name) for name, run in lags.RUNS.items()}


@pytest.mark.slow
def test_spans_go_as_far_as_they_must(results):
    longest = {name: result["longest_span"] for name, result in results.items()}
    bits = {name: result["dev_bits"] for name, result in results.items()}
    # One head covers the largest distance and hardly more; the others stay near the ramp of 32.
    for name, furthest in (("far", 512), ("half", 256)):
        assert furthest - 8 <= longest[name] <= 1.1 * furthest
        assert sorted(np.ravel(results[name]["z_LH"]))[-2] < 64
        assert lags.RUNS[name].text.entropy() - 0.02 < bits[name] < lags.RUNS[name].text.entropy() + 0.1
    # With ten times the penalty, and with a fixed span that is too short, bits are those of the span.
    assert longest["penalty"] < longest["far"] / 2
    for name in ("penalty", "fixed"):
        assert abs(bits[name] - lags.FAR.entropy(min(longest[name], 128))) < 0.05
    # Twice as far, if far copies are less rare: the span covers them all, but not every copy is learned.
    assert 1024 - 8 <= longest["further"] <= 1.1 * 1024
    assert bits["further"] < lags.FURTHER.entropy(512)
    # From z = 0, heads do not find what is only far beyond the ramp.
    assert longest["gap"] < 256
    assert bits["gap"] > lags.GAP.entropy() + 1
    assert longest["gap_initial"] >= 304
    assert bits["gap_initial"] < lags.GAP.entropy() + 0.1
