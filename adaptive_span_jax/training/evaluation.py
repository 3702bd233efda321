"""The score of a text in bits per symbol, by the published or the exact protocol.

`score` runs the model as training does, compiled once although weights and spans change. For fixed weights,
`inference/scoring.py` computes the same score faster.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from adaptive_span_jax.config import Config
from adaptive_span_jax.data.segments import ScoredSegment, every_target, whole_segments
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import transformer
from adaptive_span_jax.model.memory import memory_sharding
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training import objective
from adaptive_span_jax.training.step import EvalStep

# published: equal streams, whole segments, the rest unscored. exact: every token except the first is scored once.
# Both start every stream from empty memory.
PROTOCOLS: dict[str, Callable[[np.ndarray, int, int], Iterator[ScoredSegment]]] = {
    "published": whole_segments,
    "exact": every_target,
}


class Score(NamedTuple):
    """The result of an evaluation."""

    nats: float  # mean negative log-likelihood per scored token
    tokens: int
    z_LH: np.ndarray  # each head's z in positions, averaged over the scored tokens if it depends on the token

    @property
    def bits(self) -> float:
        """Bits per symbol."""
        return objective.bits(self.nats)

    @property
    def is_finite(self) -> bool:
        """Whether the model gave every token a probability above 0."""
        return math.isfinite(self.nats)


def score(
    config: Config,
    params: transformer.Params,
    ids: np.ndarray,
    protocol: str,
    eval_step: EvalStep,
    mesh: Mesh,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Score:
    """The score of a text. `on_progress` is called with the completed fraction."""
    segments, streams = cut_segments(config, ids, protocol), config.evaluate.batch_size
    memory = jax.jit(lambda: transformer.init_memory(config, streams), out_shardings=memory_sharding(mesh, streams))()
    return total_score(params, memory, segments, eval_step, mesh, on_progress)


def check_streams(config: Config, ids: np.ndarray, protocol: str, name: str = "the text") -> None:
    """Raises if the text is too short for the streams: each needs a whole segment (published) or one target (exact)."""
    streams, segment = config.evaluate.batch_size, config.train.segment
    if protocol == "published":
        most, least = ids.size // (segment + 1), f"a segment of {segment} (config.train.segment) and its last target"
    else:
        most, least = max(ids.size - 1, 0), "one token and its target"
    if streams > most:
        advice = f"make it at most {most}" if most else "use more text"
        raise UserError(
            f"config.evaluate.batch_size is {streams}, but {name} has only {ids.size:,} tokens, and in the {protocol} "
            f"protocol each stream needs {least}; {advice}"
        )


def cut_segments(config: Config, ids: np.ndarray, protocol: str) -> list[ScoredSegment]:
    """The segments that a protocol scores, in order."""
    check_streams(config, ids, protocol)
    return list(PROTOCOLS[protocol](ids, config.evaluate.batch_size, config.train.segment))


def total_score(
    params: transformer.Params,
    memory: Any,
    segments: list[ScoredSegment],
    eval_step: Callable,
    mesh: Mesh,
    on_progress: Callable[[float], None],
) -> Score:
    """The score over segments, which `eval_step` reads in order, starting from `memory`."""
    sums = []
    for number, segment in enumerate(segments):
        memory, found = eval_step(params, memory, sharding.place_segment(mesh, segment))
        sums.append(found)
        if number:
            # Waiting for the previous segment keeps the host at most one step ahead of the devices.
            jax.block_until_ready(sums[number - 1])
            on_progress(number / len(segments))
    scored = [int(segment.scored_BT.sum()) for segment in segments]
    tokens = sum(scored)
    # Each sum is over one segment. float64 keeps the precision of a mean over five million tokens.
    nats, z_LH = (np.asarray(each, np.float64) for each in zip(*jax.device_get(sums), strict=True))
    return Score(float(nats.sum()) / tokens, tokens, np.average(z_LH, axis=0, weights=scored))
