"""What a text costs under a model, in bits per symbol: by the published protocol, or exactly.

While training, weights and spans change: `score` runs the model as training does, compiled once. Of a finished model
`score_finished` gives the same number, faster.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax import capacity, cpu, loss, model, sharding, span
from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.finished_model import FinishedModel
from adaptive_span_jax.head_reach import CHUNK
from adaptive_span_jax.key_value_cache import KeyValueCache
from adaptive_span_jax.segments import ScoredSegment, every_target, whole_segments
from adaptive_span_jax.step import EvalStep

# published: equal streams, whole segments, the rest unscored. exact: every token but the very first is scored once.
# Both start every stream from empty memory.
PROTOCOLS: dict[str, Callable[[np.ndarray, int, int], Iterator[ScoredSegment]]] = {
    "published": whole_segments,
    "exact": every_target,
}


# Positions that a finished model reads at once: dense products like many rows. Attention goes by chunks inside.
AT_ONCE = 8 * CHUNK


class Score(NamedTuple):
    """The result of an evaluation."""

    nats: float  # mean negative log-likelihood per scored token
    tokens: int
    z_LH: np.ndarray  # each head's z in positions, averaged over the scored text where it differs between tokens

    @property
    def bits(self) -> float:
        """Bits per symbol."""
        return loss.bits(self.nats)

    @property
    def is_finite(self) -> bool:
        """Whether the model gave every token a probability above 0."""
        return math.isfinite(self.nats)


def score(
    config: Config,
    params: model.Params,
    ids: np.ndarray,
    protocol: str,
    eval_step: EvalStep,
    mesh: Mesh,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Score:
    """Scores a text. `on_progress` hears which share of it is done."""
    segments, streams = _segments(config, ids, protocol), config.evaluate.streams
    memory = jax.jit(
        lambda: model.init_memory(config, streams), out_shardings=sharding.memory_sharding(mesh, streams)
    )()
    return _total(params, memory, segments, eval_step, mesh, on_progress)


def check_streams(config: Config, ids: np.ndarray, protocol: str, name: str = "the text") -> None:
    """Refuses more streams than a text has room for: one whole segment each (published), or one target (exact)."""
    streams, segment = config.evaluate.streams, config.train.segment
    if protocol == "published":
        most, least = ids.size // (segment + 1), f"a segment of {segment} (config.train.segment) and its last target"
    else:
        most, least = max(ids.size - 1, 0), "one token and its target"
    if streams > most:
        advice = f"make it at most {most}" if most else "use more text"
        raise UserError(
            f"config.evaluate.streams is {streams}, but {name} has only {ids.size:,} tokens and by the {protocol} "
            f"protocol each stream needs {least}; {advice}"
        )


def make_finished_step(finished: FinishedModel, mesh: Mesh) -> Callable:
    """The compiled step of `score_finished`."""

    def finished_step(weights: model.Params, cache: KeyValueCache, segment: ScoredSegment) -> Any:
        logits_BTV, cache, z_LBTH = finished.read(weights, segment.tokens_BT, cache)
        nats_BT = loss.nats_BT(logits_BTV, segment.targets_BT)
        z_LH = span.mean_z(z_LBTH, segment.scored_BT)
        return cache, (jnp.where(segment.scored_BT, nats_BT, 0).sum(), z_LH)

    at = finished.cache_sharding(finished.config.evaluate.streams, mesh)
    placement, options = (at, sharding.replicated(mesh)), cpu.compiler_options(mesh)
    return jax.jit(finished_step, donate_argnums=1, out_shardings=placement, compiler_options=options)


def score_finished(
    finished: FinishedModel,
    ids: np.ndarray,
    protocol: str,
    finished_step: Callable,
    mesh: Mesh,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Score:
    """The score that `score` gives, by the key-value cache."""
    segments = _segments(finished.config, ids, protocol)
    streams = finished.config.evaluate.streams
    longest = -(-(ids.size // streams) // CHUNK) * CHUNK
    capacity.check_reading(finished, streams, min(AT_ONCE, longest), mesh, "config.evaluate.streams")
    # What a position is predicted from does not depend on where segments are cut.
    whole = ScoredSegment(*(np.concatenate(parts, axis=1) for parts in zip(*segments, strict=True)))
    count = whole.tokens_BT.shape[1]
    length = min(AT_ONCE, -(-count // CHUNK) * CHUNK)
    whole = ScoredSegment(*(np.pad(array_BN, [(0, 0), (0, -count % length)]) for array_BN in whole))
    segments = [
        ScoredSegment(*(array_BN[:, start : start + length] for array_BN in whole)) for start in range(0, count, length)
    ]
    cache = finished.empty_cache(finished.config.evaluate.streams, mesh)
    return _total(finished.weights, cache, segments, finished_step, mesh, on_progress)


def _segments(config: Config, ids: np.ndarray, protocol: str) -> list[ScoredSegment]:
    check_streams(config, ids, protocol)
    return list(PROTOCOLS[protocol](ids, config.evaluate.streams, config.train.segment))


def _total(
    params: model.Params,
    memory: Any,
    segments: list[ScoredSegment],
    eval_step: Callable,
    mesh: Mesh,
    on_progress: Callable[[float], None],
) -> Score:
    sums = []
    for number, segment in enumerate(segments):
        memory, found = eval_step(params, memory, sharding.place_segment(mesh, segment))
        sums.append(found)
        if number:
            # Waiting for the segment before keeps the host one step ahead of the devices, and no further.
            jax.block_until_ready(sums[number - 1])
            on_progress(number / len(segments))
    scored = [int(segment.scored_BT.sum()) for segment in segments]
    tokens = sum(scored)
    # Each sum is over one segment; adding them up in float64 keeps the digits of a five-million-token mean.
    nats, z_LH = (np.asarray(each, np.float64) for each in zip(*jax.device_get(sums), strict=True))
    return Score(float(nats.sum()) / tokens, tokens, np.average(z_LH, axis=0, weights=scored))
