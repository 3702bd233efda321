"""Attention of one layer. In: queries, segment, memory, projections, position table and spans. Out: an average of
values, output_BTHK, and the logarithm of its normaliser, log_sum_BTH.

Read reference.py first. It is the definition, and it computes every score. A path is a module with the signature of
`reference.attend`; paths.py chooses one by `model.attention`:

    reference   "plain": also the oracle of the tests, and what reports show as attention weights.
    per_head    "per_head": each head costs what it reads, on any platform. near.py has the distances that all heads
                read, far.py the loops over the rest, far_tile.py one of their tiles.
    fused/      "fused": the same in two Pallas kernels for TPUs. Its __init__.py explains how they walk.

The default, "auto", takes fused on TPUs if the sizes allow (`fused.unsupported` says which do) and per_head otherwise.
The start-up block of a run says which path it takes and, if not fused, why.

The first two use skew.py (scores by key ↔ scores by distance); online_softmax.py is the masked softmax of per_head,
tile by tile. Decoding has its own attention over a KV cache, in inference/cache.py.

persistent.py is no path: it has the attention to a head's persistent vectors (`model.persistent`), and merges it with
that of any path, or of the KV cache, by the two log-sums. With the fused kernels, fused/persistent.py does both.

To add a path: write a module with `attend`, name it in `config.ATTENTION_PATHS`, choose it in paths.py, and compare its
output and every gradient with the reference, as in tests/model/test_attention.py. If its cost differs, flops.py has to
count it.
"""
