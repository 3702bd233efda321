"""What a model attends to: each head's attention by distance, and the spans at each character of a passage."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.corpus import Corpus
from adaptive_span_jax.data.segments import whole_segments
from adaptive_span_jax.model import span, transformer
from adaptive_span_jax.model.memory import Memory

# Enough tokens for smooth averages, few enough for the reference attention on a CPU.
_SEGMENTS = 8
_LONGEST_SEGMENT = 128
_LARGEST_ARRAY = 2**24

_PASSAGE = 120


class Probe(NamedTuple):
    """Measurements on dev, with memory filled as far as the text allows."""

    # Attention by distance, averaged over tokens; column x − 1 is distance x. What is missing to a sum of 1 is the
    # attention to persistent vectors.
    weight_LHS: np.ndarray
    furthest_z_LH: np.ndarray  # each head's z in positions, the largest over tokens
    queries: int  # the number of tokens averaged over
    passage: bytes
    passage_span_T: np.ndarray  # the span at each of its characters, averaged over heads


def length(config: Config) -> int:
    """The symbols per stream that a probe reads if the text is long enough: to fill the memory, then to measure."""
    segment = min(config.train.segment, _LONGEST_SEGMENT)
    return (-(-config.span.limit // segment) + _SEGMENTS) * segment + 1


def probe_model(config: Config, params: transformer.Params, corpus: Corpus) -> Probe:
    """Probes a model on part of dev with the reference attention on one device."""
    limit, heads = config.span.limit, config.model.heads
    segment = min(config.train.segment, _LONGEST_SEGMENT, corpus.dev.size - 1)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, segment=segment))
    affordable = _LARGEST_ARRAY // (heads * segment * (limit + segment))
    streams = max(1, min(config.evaluate.batch_size, affordable, (corpus.dev.size - 1) // segment))

    @jax.jit
    def read(params: transformer.Params, memory: Memory, tokens_BT: np.ndarray) -> tuple[Memory, jax.Array]:
        inputs_LBTD = transformer.apply(config, params, tokens_BT, memory).inputs_LBTD
        return memory.advance(inputs_LBTD, limit), inputs_LBTD

    @jax.jit
    def attention(params: transformer.Params, inputs_LBTD: jax.Array, memory: Memory) -> tuple[jax.Array, jax.Array]:
        return transformer.mean_attention(config, params, inputs_LBTD, memory)

    filling = -(-limit // segment)
    tokens = [each.tokens_BT for each in whole_segments(corpus.dev, streams, segment)][: filling + _SEGMENTS]
    probed = tokens[-_SEGMENTS:]
    memory, results = transformer.init_memory(config, streams), []
    for number, tokens_BT in enumerate(tokens):
        after, inputs_LBTD = read(params, memory, tokens_BT)
        if number >= len(tokens) - len(probed):
            results.append(jax.device_get(attention(params, inputs_LBTD, memory)))
        memory = after
    weight_NLHS, z_NLBTH = (np.stack(each) for each in zip(*results, strict=True))
    span_NLBTH = span.head_spans(z_NLBTH, config.span.ramp, limit)
    span_T = span_NLBTH[:, :, 0].mean(axis=(1, 3)).ravel()
    first_stream = np.concatenate([tokens_BT[0] for tokens_BT in probed])[:_PASSAGE]
    return Probe(
        weight_LHS=weight_NLHS.mean(axis=0),
        furthest_z_LH=z_NLBTH.max(axis=(0, 2, 3)),
        queries=len(probed) * streams * segment,
        passage=corpus.decode(first_stream),
        passage_span_T=span_T[:_PASSAGE],
    )
