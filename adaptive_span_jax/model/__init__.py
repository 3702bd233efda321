"""The model. In: token ids and memory. Out: logits, penalty, spans and the hidden states to append to memory.

Everything here is a pure function of arrays. Parameters are a plain nested dict with stacked layers.

Start with transformer.py, then layers.py (the layer, and `SpanAttention` for use in other models), span.py (the soft
mask, its derivative, a head's reach, the three kinds of span), memory.py (what is carried from segment to segment) and
attention/. dropout.py and linear.py are the primitives; flops.py counts what a step costs at given spans.
"""
