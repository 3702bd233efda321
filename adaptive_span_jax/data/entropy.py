"""The entropy of a text given the last few symbols: baselines for any model."""

import numpy as np


def order2_bits(ids: np.ndarray) -> float:
    """Empirical conditional entropy, in bits, of a symbol given the two before it.

    The counts are those of `ids` itself, so the result is too low for short texts, in which most contexts occur once.
    """
    if len(ids) < 3:
        raise ValueError(f"needs at least three symbols, got {len(ids)}")
    size = int(ids.max()) + 1
    ids = ids.astype(np.int64)
    trigrams = (ids[:-2] * size + ids[1:-1]) * size + ids[2:]
    # A table of size³ counts is at most 128 MiB for bytes, and filling it is several times faster than sorting.
    count_of_trigram = np.bincount(trigrams, minlength=size**3)
    count_of_context = count_of_trigram.reshape(-1, size).sum(axis=1)
    # Σ n(abc)·log2(n(ab·)/n(abc)) / N, as two sums of n·log2 n.
    return (_sum_n_log_n(count_of_context) - _sum_n_log_n(count_of_trigram)) / len(trigrams)


def order_bits(ids: np.ndarray, order: int) -> float:
    """`order2_bits` for the last `order` symbols, at most 7; by sorting, so it takes 16 bytes of memory per symbol."""
    if not 0 <= order <= 7:
        raise ValueError(f"order is {order}; it must be between 0 and 7, so that a context and its symbol fit 64 bits")
    if len(ids) <= order:
        raise ValueError(f"needs more than {order} symbols, got {len(ids)}")
    last = len(ids) - order
    grams = np.zeros(last, np.uint64)
    for start in range(order + 1):
        grams <<= np.uint64(8)
        grams |= ids[start : start + last]
    grams.sort()
    count_of_gram = _run_lengths(grams)
    grams >>= np.uint64(8)
    return (_sum_n_log_n(_run_lengths(grams)) - _sum_n_log_n(count_of_gram)) / last


def _run_lengths(ordered: np.ndarray) -> np.ndarray:
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return np.diff(np.concatenate([[0], starts, [ordered.size]]))


def _sum_n_log_n(counts: np.ndarray) -> float:
    counts = counts[counts > 0].astype(np.float64)
    return float((counts * np.log2(counts)).sum())
