"""Inference with fixed weights. In: a checkpoint. Out: scores, text, spans or compressed files.

Start with loaded_model.py (`adaptive_span_jax.load`), then decoder.py (token ids and KV cache in, logits and KV cache
out) and cache.py (the rings of keys and values, and attention over them). cache_plan.py computes from the weights how
far back each head reads, and so how long its rings are. sampling.py draws tokens, scoring.py scores whole texts on
several devices, codec.py compresses with the model's probabilities, capacity.py checks memory before allocating it.
"""
