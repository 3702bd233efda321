"""How many bits a symbol costs when only the two symbols before it are known: what any model should beat."""

import numpy as np


def order2_bits(ids: np.ndarray) -> float:
    """Empirical conditional entropy, in bits, of a symbol given the two before it.

    The counts are those of `ids` itself, so short texts come out too low: most contexts are then seen only once.
    """
    if len(ids) < 3:
        raise ValueError(f"needs at least three symbols, got {len(ids)}")
    size = int(ids.max()) + 1
    ids = ids.astype(np.int64)
    trigrams = (ids[:-2] * size + ids[1:-1]) * size + ids[2:]
    # A table of size³ counts is at most 128 MiB for bytes, and several times quicker to fill than sorting.
    count_of_trigram = np.bincount(trigrams, minlength=size**3)
    count_of_context = count_of_trigram.reshape(-1, size).sum(axis=1)
    # Σ n(abc)·log2(n(ab·)/n(abc)) / N, as two sums of n·log2 n.
    return (_sum_n_log_n(count_of_context) - _sum_n_log_n(count_of_trigram)) / len(trigrams)


def _sum_n_log_n(counts: np.ndarray) -> float:
    counts = counts[counts > 0].astype(np.float64)
    return float((counts * np.log2(counts)).sum())
