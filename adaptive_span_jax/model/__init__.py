"""The model: token ids and memory in; logits, penalty, spans and the next inputs of memory out.

Everything here is a pure function of arrays, and only `per_device` in attention/ knows that there are several devices.
Parameters are a plain nested dict with layers stacked.

Read transformer.py first, then layers.py (the layer, and `SpanAttention` for use in other models), span.py (the soft
mask and the three kinds of span), memory.py (what is carried from segment to segment) and attention/. dropout.py and
linear.py are the primitives; flops.py counts what a step costs at given spans.
"""
