"""A short text for the report, sampled from the model after a prompt from dev."""

import codecs
import dataclasses
import re
from typing import NamedTuple

import jax
import numpy as np

from adaptive_span_jax.checkpoint.metadata import CheckpointMetadata
from adaptive_span_jax.config import Config
from adaptive_span_jax.data.corpus import Corpus, vocabulary_text
from adaptive_span_jax.data.segments import Position
from adaptive_span_jax.inference.loaded_model import LoadedModel
from adaptive_span_jax.inference.sampling import Sampling
from adaptive_span_jax.model.transformer import Params
from adaptive_span_jax.runtime import sharding

_PROMPT = 64
_LENGTH = 400
_TEMPERATURE = 0.8


class Sample(NamedTuple):
    """A prompt and its continuation, as printable text."""

    prompt: str
    continuation: str
    temperature: float


def draw_sample(config: Config, params: Params, corpus: Corpus, step: int) -> Sample | None:
    """The model's continuation of the first symbols of dev; None if its parameters or predictions are not finite."""
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        return None
    mesh = sharding.make_mesh(jax.local_devices()[:1])
    symbols = vocabulary_text(corpus.vocabulary)
    saved = CheckpointMetadata(step, Position(), 0.0, corpus.fingerprint, symbols, dataclasses.asdict(config))
    model = LoadedModel(config, saved, jax.device_put(params, sharding.replicated(mesh)), mesh)
    prompt = corpus.decode(corpus.dev[:_PROMPT])
    drawn = list(model.continuation(prompt, _LENGTH, 1, Sampling(_TEMPERATURE), seed=0))
    token_N, logprob_N = (np.concatenate(each) for each in zip(*drawn, strict=True))
    if not np.isfinite(logprob_N).all():
        return None
    return Sample(*shown_parts(prompt, corpus.decode(token_N)), _TEMPERATURE)


def shown_parts(prompt: bytes, continuation: bytes) -> tuple[str, str]:
    """Both parts as text; invalid UTF-8 and control characters are replaced."""
    # A character that starts in the prompt and ends in the continuation belongs to the latter.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    first, second = decoder.decode(prompt), decoder.decode(continuation, final=True)
    control = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
    return control.sub("\ufffd", first), control.sub("\ufffd", second)
