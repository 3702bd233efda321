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


def test_distances_are_as_frequent_as_they_should_be():
    assert_allclose(np.bincount(records(200_000)[:, 0]) / 200_000, TEXT.probability_J, atol=0.005)


def test_entropy_against_counts():
    """With a span of 40, a copy is known if it comes from at most 40 back, else it is any f."""
    first_N = records(200_000)[:, 0]
    found_J = np.bincount(first_N) / 200_000
    bits = -(found_J * np.log2(found_J)).sum()
    unseen = (TEXT.distance_J[first_N] > 40).mean()
    assert_allclose(TEXT.entropy(40), (bits + unseen * bits) / 2, rtol=0.005)
    assert_allclose(TEXT.entropy(), bits / 2, rtol=0.005)
    assert_allclose(TEXT.entropy(7), bits, rtol=0.005)


GAP = lags.Text(spacing=8, first=9, last=12)
RUNS = {
    "far": lags.Run("", TEXT, {}),
    "half": lags.Run("", TEXT._replace(spacing=4), {}),
    "penalty": lags.Run("", TEXT, {"span.penalty": 1e-3}),
    "fixed": lags.Run("", TEXT, {"span.kind": "fixed", "span.limit": 40, "span.penalty": 0.0}),
    "gap": lags.Run("", GAP, {}),
    "gap_initial": lags.Run("", GAP, {"span.initial": 96.0}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("lags")
    short = {"train.steps": 600, "span.limit": 256, "data.max_bytes": 1_000_000}
    return {name: lags.train(run._replace(fields=short | run.fields), folder / name) for name, run in RUNS.items()}


@pytest.mark.slow
@pytest.mark.xdist_group("lags")
def test_spans_go_as_far_as_they_must(results):
    longest = {name: result["longest_span"] for name, result in results.items()}
    bits = {name: result["dev_bits"] for name, result in results.items()}
    for name in ("far", "half", "gap_initial"):
        assert bits[name] < RUNS[name].text.entropy() + 0.1, name
    assert longest["far"] >= 96
    assert longest["half"] < longest["far"]
    assert longest["penalty"] < longest["far"]
    # A span that is too short cannot do better than what it allows, and a gap is never found from z = 0.
    assert bits["fixed"] > TEXT.entropy(40) - 0.02 > TEXT.entropy() + 0.2
    assert longest["gap"] < 72
    assert bits["gap"] > GAP.entropy(0) - 0.02
