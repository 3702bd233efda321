"""Attention of one layer: queries, segment, memory, projections, position table and spans in; output_BTHK out.

Read reference.py first. It is the definition, and it computes every score. A path is a module with the signature of
`reference.attend`, and `SpanAttention.attend` in model/layers.py chooses one:

    per_head    `model.attention = "per_head"`, the default: each head costs what it reads. near.py has the distances
                that all heads read, far.py the loops over the rest, far_tile.py one of their tiles.
    reference   `model.attention = "plain"`; also the oracle of the tests, and what reports show as attention weights.

Both use skew.py (scores by key ↔ scores by distance); online_softmax.py is the masked softmax of per_head, tile by
tile. Decoding has its own attention over a KV cache, in inference/cache.py.

To add a path: write a module with `attend`, name it in `config.ATTENTION_PATHS`, choose it in `SpanAttention.attend`,
and add it to tests/model/test_attention.py, which compares the output and every gradient with the reference. If its
cost differs, flops.py has to count it.
"""
