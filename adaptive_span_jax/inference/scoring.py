"""The score of a text, computed with the KV cache: equal to `training/evaluation.py`, for fixed weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax.data.segments import ScoredSegment
from adaptive_span_jax.inference import capacity
from adaptive_span_jax.inference.cache import KVCache
from adaptive_span_jax.inference.cache_plan import CHUNK
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.model import span, transformer
from adaptive_span_jax.runtime import cpu, sharding
from adaptive_span_jax.training import objective
from adaptive_span_jax.training.evaluation import Score, cut_segments, total_score

# Positions per call: dense products are faster with many rows. Attention cuts them into chunks.
AT_ONCE = 8 * CHUNK


def make_decoder_step(decoder: CachedDecoder, mesh: Mesh) -> Callable:
    """The compiled step of `score_with_cache`."""

    def decoder_step(weights: transformer.Params, cache: KVCache, segment: ScoredSegment) -> Any:
        logits_BTV, cache, z_LBTH = decoder.read(weights, segment.tokens_BT, cache)
        nats_BT = objective.nats_BT(logits_BTV, segment.targets_BT)
        z_LH = span.mean_z(z_LBTH, segment.scored_BT)
        return cache, (jnp.where(segment.scored_BT, nats_BT, 0).sum(), z_LH)

    cache_sharding = decoder.cache_sharding(decoder.config.evaluate.batch_size, mesh)
    shardings, options = (cache_sharding, sharding.replicated(mesh)), cpu.compiler_options(mesh)
    return jax.jit(decoder_step, donate_argnums=1, out_shardings=shardings, compiler_options=options)


def score_with_cache(
    decoder: CachedDecoder,
    ids: np.ndarray,
    protocol: str,
    decoder_step: Callable,
    mesh: Mesh,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Score:
    """The same score as `evaluation.score`, computed with the KV cache."""
    segments = cut_segments(decoder.config, ids, protocol)
    streams = decoder.config.evaluate.batch_size
    longest = -(-(ids.size // streams) // CHUNK) * CHUNK
    capacity.check_reading(decoder, streams, min(AT_ONCE, longest), mesh, "config.evaluate.batch_size")
    # Predictions do not depend on segment boundaries, so segments are joined.
    text = ScoredSegment(*(np.concatenate(parts, axis=1) for parts in zip(*segments, strict=True)))
    count = text.tokens_BT.shape[1]
    length = min(AT_ONCE, -(-count // CHUNK) * CHUNK)
    text = ScoredSegment(*(np.pad(array_BN, [(0, 0), (0, -count % length)]) for array_BN in text))
    segments = [
        ScoredSegment(*(array_BN[:, start : start + length] for array_BN in text)) for start in range(0, count, length)
    ]
    cache = decoder.empty_cache(decoder.config.evaluate.batch_size, mesh)
    return total_score(decoder.weights, cache, segments, decoder_step, mesh, on_progress)
