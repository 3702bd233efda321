"""What a model does while it reads: where its heads look, and how far at each character of a passage."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from adaptive_span_jax import model, span
from adaptive_span_jax.config import Config
from adaptive_span_jax.corpus import Corpus
from adaptive_span_jax.memory import Memory
from adaptive_span_jax.segments import whole_segments

# Enough tokens for smooth averages, few enough for plain attention on a CPU.
_SEGMENTS = 8
_LONGEST_SEGMENT = 128
_LARGEST_ARRAY = 2**24

_PASSAGE = 120


class Observation(NamedTuple):
    """What was seen on dev, with memory filled first as far as the text goes."""

    weight_LHS: np.ndarray  # attention by distance, averaged over tokens; column x − 1 is distance x
    furthest_z_LH: np.ndarray  # each head's z in positions, the largest over tokens
    queries: int  # how many tokens
    passage: bytes
    passage_span_T: np.ndarray  # the span under each of its characters, averaged over heads


def observe(config: Config, params: model.Params, corpus: Corpus) -> Observation:
    """Lets the model read some of dev, on one device, and watches its heads by plain attention."""
    limit, heads = config.span.limit, config.model.heads
    segment = min(config.train.segment, _LONGEST_SEGMENT, corpus.dev.size - 1)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, segment=segment))
    affordable = _LARGEST_ARRAY // (heads * segment * (limit + segment))
    streams = max(1, min(config.evaluate.streams, affordable, (corpus.dev.size - 1) // segment))

    @jax.jit
    def read(params: model.Params, memory: Memory, tokens_BT: np.ndarray) -> tuple[Memory, jax.Array]:
        inputs_LBTD = model.apply(config, params, tokens_BT, memory).inputs_LBTD
        return memory.advance(inputs_LBTD, limit), inputs_LBTD

    @jax.jit
    def look(params: model.Params, inputs_LBTD: jax.Array, memory: Memory) -> tuple[jax.Array, jax.Array]:
        return model.mean_attention(config, params, inputs_LBTD, memory)

    filling = -(-limit // segment)
    tokens = [each.tokens_BT for each in whole_segments(corpus.dev, streams, segment)][: filling + _SEGMENTS]
    watched = tokens[-_SEGMENTS:]
    memory, found = model.init_memory(config, streams), []
    for number, tokens_BT in enumerate(tokens):
        after, inputs_LBTD = read(params, memory, tokens_BT)
        if number >= len(tokens) - len(watched):
            found.append(jax.device_get(look(params, inputs_LBTD, memory)))
        memory = after
    weight_NLHS, z_NLBTH = (np.stack(each) for each in zip(*found, strict=True))
    span_NLBTH = span.head_spans(z_NLBTH, config.span.ramp, limit)
    span_T = span_NLBTH[:, :, 0].mean(axis=(1, 3)).ravel()
    first_stream = np.concatenate([tokens_BT[0] for tokens_BT in watched])[:_PASSAGE]
    return Observation(
        weight_LHS=weight_NLHS.mean(axis=0),
        furthest_z_LH=z_NLBTH.max(axis=(0, 2, 3)),
        queries=len(watched) * streams * segment,
        passage=corpus.decode(first_stream),
        passage_span_T=span_T[:_PASSAGE],
    )
