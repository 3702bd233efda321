"""What tends to go wrong with spans in training, recognized from a run's logs, and what to try."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model.span import head_spans
from adaptive_span_jax.runtime.terminal import counted

# Fewer lines of the log than this, counted after warm-up, say nothing about where spans are going.
_LINES = 6
# Spans that all moved less than this many positions in the later half of that time do not move any more.
_STILL = 0.5
_SATURATED_SHARE = 0.25
_PENALTY_SHARE = 0.1


class Concern(NamedTuple):
    """Something that is probably not meant."""

    name: str
    found: str
    advice: str


def config_concerns(config: Config) -> list[Concern]:
    """What to warn of before the first step, given the config alone."""
    limit, ramp = config.span.limit, config.span.ramp
    if config.span.kind == "fixed" or ramp <= limit:
        return []
    return [
        Concern(
            "ramp",
            f"config.span.ramp is {ramp:,}, longer than config.span.limit, which is {limit:,}: the mask never falls to "
            "0 within the limit, so every head reads all of it and spans save nothing",
            "Make the ramp shorter (published: 32) or the limit larger",
        )
    ]


def concerns(config: Config, metrics: Sequence[dict[str, Any]], spans: Sequence[dict[str, Any]]) -> list[Concern]:
    """What to warn of, given the lines of `metrics.jsonl` and `spans.jsonl` so far."""
    if config.span.kind == "fixed" or not spans:
        return []
    found = (_frozen(config, spans), _saturated(config, spans), _penalty_dominates(config, metrics))
    return [concern for concern in found if concern]


def describe(concern: Concern) -> str:
    """One line for logs."""
    return f"warning: {concern.found}. {concern.advice}"


def _frozen(config: Config, spans: Sequence[dict[str, Any]]) -> Concern | None:
    lines = [line for line in spans if line["step"] > config.train.warmup_steps]
    if len(lines) < _LINES:
        return None
    later = lines[len(lines) // 2 :]
    z_NLH = np.array([line["z_LH"] for line in later])
    if np.ptp(z_NLH, axis=0).max() >= _STILL:
        return None
    where = "at their smallest, z = 0," if z_NLH.max() < _STILL else f"at z = {z_NLH[-1].mean():.1f} on average"
    return Concern(
        "frozen",
        f"spans are frozen: since step {later[0]['step']:,} every head stands {where} and moved less than {_STILL} "
        "positions",
        f"Try a smaller penalty (config.span.penalty is {config.span.penalty:g}) or a higher learning rate "
        f"(config.train.learning_rate is {config.train.learning_rate:g}): spans learn with the rate of all parameters. "
        "If dev bits still improve, short spans may simply be enough for this text and model size",
    )


def _saturated(config: Config, spans: Sequence[dict[str, Any]]) -> Concern | None:
    limit = config.span.limit
    z_LH = np.array(spans[-1]["z_LH"])
    full = int((head_spans(z_LH, config.span.ramp, limit) >= limit).sum())
    # Where the ramp alone fills the limit there is nothing to saturate.
    if limit <= config.span.ramp or full < _SATURATED_SHARE * z_LH.size:
        return None
    return Concern(
        "saturated",
        f"spans are saturated: {full} of {counted(z_LH.size, 'head')} read all S = {counted(limit, 'position')} at "
        f"step {spans[-1]['step']:,}",
        f"Try a larger limit (config.span.limit, in a new run), or, if they should be shorter, a larger penalty "
        f"(config.span.penalty is {config.span.penalty:g})",
    )


def _penalty_dominates(config: Config, metrics: Sequence[dict[str, Any]]) -> Concern | None:
    # After a bad step numbers may be missing.
    lines = [line for line in metrics if "penalty_nats" in line and "train_bits" in line]
    if not lines:
        return None
    nats = lines[-1]["train_bits"] * np.log(2)
    share = lines[-1]["penalty_nats"] / (lines[-1]["penalty_nats"] + nats)
    if share < _PENALTY_SHARE:
        return None
    return Concern(
        "penalty",
        f"the penalty dominates: it is {100 * share:.0f} % of the loss at step {lines[-1]['step']:,} (published "
        "models: below 1 %)",
        f"Try a tenth of it (config.span.penalty is {config.span.penalty:g}; published: 2e-6, and 5e-7 for S = 8192)",
    )
