"""Dropout by hashing: the keep rate, and independence along every axis and between seeds."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.model.dropout import Dropout

RATE = 0.3


def kept(dropout: Dropout, rows: int = 257, columns: int = 1031) -> np.ndarray:
    scale = dropout.at(jnp.arange(rows)[:, None]).at(jnp.arange(columns)[None, :]).scale()
    return np.asarray(scale) > 0


def test_rate_and_scale():
    scale = np.asarray(Dropout.create(RATE, 1, 2).at(jnp.arange(100_000)).scale())
    assert_allclose((scale > 0).mean(), 1 - RATE, atol=0.005)
    assert_allclose(np.unique(scale), [0, 1 / (1 - RATE)], rtol=1e-6)


def test_pure_function_of_its_indices():
    assert_array_equal(kept(Dropout.create(RATE, 1, 2)), kept(Dropout.create(RATE, 1, 2)))


@pytest.mark.parametrize(
    "other",
    [
        Dropout.create(RATE, 2, 2),
        Dropout.create(RATE, 1, 3),
        Dropout.create(RATE, 2, 1),
        Dropout.create(RATE, 1, 2).at(0),
    ],
    ids=["seed", "step", "seed and step exchanged", "layer"],
)
def test_different_places_are_independent(other):
    a, b = kept(Dropout.create(RATE, 1, 2)), kept(other)
    # Independent masks are both kept at 0.49 of all places; 265,000 draws have a standard deviation of 0.001.
    assert_allclose((a & b).mean(), (1 - RATE) ** 2, atol=0.005)
    # Nor is one a permutation of the other within rows: the numbers kept per row differ.
    assert (a.sum(axis=1) != b.sum(axis=1)).mean() > 0.9


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 64), (16, 0), (1, -1)])
def test_neighbors_are_independent(shift):
    mask = kept(Dropout.create(RATE, 1, 2))
    assert_allclose((mask & np.roll(mask, shift, axis=(0, 1))).mean(), (1 - RATE) ** 2, atol=0.005)


def test_rows_and_columns_keep_the_rate():
    mask = kept(Dropout.create(RATE, 7, 0), 1024, 1024)
    for axis in (0, 1):
        spread = mask.mean(axis=axis).std()
        assert_allclose(spread, np.sqrt(RATE * (1 - RATE) / 1024), rtol=0.15)
