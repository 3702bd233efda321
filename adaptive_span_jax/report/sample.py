"""Text for the report that the model generates: a short sample, and a stand-in for a corpus that is not here."""

import codecs
import dataclasses
import re
from typing import NamedTuple

import jax
import numpy as np

from adaptive_span_jax.checkpoint.metadata import CheckpointMetadata
from adaptive_span_jax.config import Config
from adaptive_span_jax.data import corpus as corpora
from adaptive_span_jax.data.corpus import Corpus
from adaptive_span_jax.data.segments import Position
from adaptive_span_jax.inference.loaded_model import LoadedModel
from adaptive_span_jax.inference.sampling import Sampling
from adaptive_span_jax.model.transformer import Params
from adaptive_span_jax.runtime import sharding

GENERATED = "text that the model generated"

_PROMPT = 64
_LENGTH = 400
_TEMPERATURE = 0.8


class Sample(NamedTuple):
    """A prompt and its continuation, as printable text."""

    prompt: str
    continuation: str
    temperature: float
    source: str  # the name of the text that starts with the prompt


def draw_sample(config: Config, params: Params, corpus: Corpus, step: int, source: str) -> Sample | None:
    """The model's continuation of the first symbols of dev; None if its parameters or predictions are not finite.

    `source` is the name of the text in `corpus.dev`.
    """
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params)):
        return None
    symbols = corpora.vocabulary_text(corpus.vocabulary)
    saved = CheckpointMetadata(step, Position(), 0.0, corpus.fingerprint, symbols, dataclasses.asdict(config))
    model = _model(config, params, saved)
    prompt = corpus.decode(corpus.dev[:_PROMPT])
    drawn = list(model.continuation(prompt, _LENGTH, 1, Sampling(_TEMPERATURE), seed=0))
    token_N, logprob_N = (np.concatenate(each) for each in zip(*drawn, strict=True))
    if not np.isfinite(logprob_N).all():
        return None
    return Sample(*shown_parts(prompt, corpus.decode(token_N)), _TEMPERATURE, source)


def generated_corpus(config: Config, params: Params, saved: CheckpointMetadata, length: int) -> Corpus:
    """A corpus whose dev the model generated, as many streams as an evaluation reads, `length` symbols each."""
    model, streams = _model(config, params, saved), config.evaluate.batch_size
    texts = model.generate(model.vocabulary[0], length, samples=streams)
    dev, nothing = model.encode(b"".join(texts)), np.zeros(0, np.uint8)
    return Corpus(
        config.data.source, corpora.unit(config.data), nothing, dev, nothing, model.vocabulary, saved.fingerprint
    )


def _model(config: Config, params: Params, saved: CheckpointMetadata) -> LoadedModel:
    mesh = sharding.make_mesh(jax.local_devices()[:1])
    return LoadedModel(config, saved, jax.device_put(params, sharding.replicated(mesh)), mesh)


def shown_parts(prompt: bytes, continuation: bytes) -> tuple[str, str]:
    """Both parts as text; invalid UTF-8 and control characters are replaced."""
    # A character that starts in the prompt and ends in the continuation belongs to the latter.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    first, second = decoder.decode(prompt), decoder.decode(continuation, final=True)
    control = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
    return control.sub("\ufffd", first), control.sub("\ufffd", second)
