"""Adaptive attention span in Transformers, in JAX and Flax.

Public names, each imported on first use (`import adaptive_span_jax` does not import JAX):

    load                                   the model of a run's checkpoint: scores and generates text, has spans
    SpanAttention                          the attention layer, for any Flax model
    FixedSpan, AdaptiveSpan, DynamicSpan   its three kinds of span
    project                                clips learned spans to [0, 1] after an update

Sub-packages in reading order, which is also the order of the data flow. Each imports only from those before it:

    config, errors   the config fields and their rules; the error types shown to users
    runtime/         the machine: mesh and shardings, hosts, CPU devices, storage, locks, signals, terminal
    data/            bytes → token ids → parallel streams → segments
    model/           token ids, memory → logits, spans; attention/ has the reference and the fast path
    checkpoint/      trees of arrays ↔ sealed folders
    training/        a step as a pure function, the loop around it, evaluation, metrics
    inference/       fixed weights: KV cache, decoder, sampling, scoring, compression
    report/          the paper's figures and tables for a run
    planning/        memory and speed on other hardware
    interop/         checkpoints of the published PyTorch code
    commands/, cli   one file per --mode; flags → config → command

Array names end in the letters of their axes:

    B streams · T positions of a segment · S the span limit · J keys · M rows of memory or of a ring · G its segments
    D model width · H heads · K width of a head · F feed-forward width · V vocabulary · L layers
    N chunks of C queries · W near window · P rows of the padded position table · Y rows of it that one tile reads
    E a head's key and value, concatenated · Q all heads' queries, concatenated · X blocks · I query blocks of a kernel
    U persistent vectors of a head
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from adaptive_span_jax.inference.loaded_model import load
    from adaptive_span_jax.model.layers import SpanAttention
    from adaptive_span_jax.model.span import AdaptiveSpan, DynamicSpan, FixedSpan, project

__all__ = ["AdaptiveSpan", "DynamicSpan", "FixedSpan", "SpanAttention", "load", "project"]

_MODULES = {
    "load": "adaptive_span_jax.inference.loaded_model",
    "SpanAttention": "adaptive_span_jax.model.layers",
    **dict.fromkeys(("FixedSpan", "AdaptiveSpan", "DynamicSpan", "project"), "adaptive_span_jax.model.span"),
}


def __getattr__(name: str) -> Any:
    # Importing JAX takes seconds, and the command line validates its flags first.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
