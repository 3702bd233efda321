"""The order-2 entropy of a text: bits per symbol given the two symbols before it, a baseline for any model."""

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


def _sum_n_log_n(counts: np.ndarray) -> float:
    counts = counts[counts > 0].astype(np.float64)
    return float((counts * np.log2(counts)).sum())
