import collections
import math

import numpy as np
import numpy.testing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_span_jax.data.entropy import order2_bits, order_bits


def test_known_values():
    npt.assert_allclose(order2_bits(np.array([3, 1, 4] * 100, np.uint8)), 0, atol=1e-12)
    # After the context (0, 0) both symbols follow once; the other contexts are followed by one symbol only.
    npt.assert_allclose(order2_bits(np.array([0, 0, 0, 1], np.uint8)), 1.0)


@given(st.lists(st.integers(0, 4), min_size=3, max_size=60))
def test_is_the_definition(symbols):
    trigrams = list(zip(symbols, symbols[1:], symbols[2:], strict=False))
    count_of_trigram = collections.Counter(trigrams)
    count_of_context = collections.Counter(trigram[:2] for trigram in trigrams)
    expected = -sum(math.log2(count_of_trigram[t] / count_of_context[t[:2]]) for t in trigrams) / len(trigrams)
    npt.assert_allclose(order2_bits(np.array(symbols, np.uint8)), expected, atol=1e-12)


def test_random_bytes_cost_nearly_log2_of_their_number():
    ids = np.random.default_rng(0).integers(0, 5, 200_003).astype(np.uint8)
    npt.assert_allclose(order2_bits(ids), math.log2(5), rtol=1e-3)


def test_highest_byte_values_do_not_overflow():
    npt.assert_allclose(order2_bits(np.array([255, 255, 255, 254], np.uint8)), 1.0)


def test_too_few_symbols():
    with pytest.raises(ValueError, match="at least three"):
        order2_bits(np.array([1, 2], np.uint8))


@given(st.lists(st.integers(250, 255), min_size=9, max_size=60), st.integers(0, 7))
def test_any_order_is_the_definition(symbols, order):
    grams = [tuple(symbols[start : start + order + 1]) for start in range(len(symbols) - order)]
    count_of_gram = collections.Counter(grams)
    count_of_context = collections.Counter(gram[:-1] for gram in grams)
    expected = -sum(math.log2(count_of_gram[gram] / count_of_context[gram[:-1]]) for gram in grams) / len(grams)
    npt.assert_allclose(order_bits(np.array(symbols, np.uint8), order), expected, atol=1e-12)


def test_contexts_that_do_not_fit_are_rejected():
    for order in (-1, 8):
        with pytest.raises(ValueError, match=f"order is {order}"):
            order_bits(np.zeros(20, np.uint8), order)
    with pytest.raises(ValueError, match="more than 3 symbols"):
        order_bits(np.zeros(3, np.uint8), 3)
