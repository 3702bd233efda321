"""Warnings about spans, derived from a run's logs, with advice."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from adaptive_span_jax.config import Config
from adaptive_span_jax.model.span import head_spans
from adaptive_span_jax.runtime.terminal import counted

# With fewer log lines than this after warm-up, no trend of the spans can be determined.
_LINES = 6
# Spans are frozen if all of them moved less than this many positions in the second half of that time.
_STILL = 0.5
_SATURATED_SHARE = 0.25
_PENALTY_SHARE = 0.1


class Concern(NamedTuple):
    """A warning: a name, what was observed, what to try."""

    name: str
    found: str
    advice: str


def config_concerns(config: Config) -> list[Concern]:
    """The warnings that follow from the config alone."""
    limit, ramp = config.span.limit, config.span.ramp
    if config.span.kind == "fixed" or ramp <= limit:
        return []
    return [
        Concern(
            "ramp",
            f"config.span.ramp is {ramp:,}, longer than config.span.limit, which is {limit:,}: the mask never reaches "
            "0 within the limit, so every head reads all of it and adaptive spans save nothing",
            "Make the ramp shorter (published: 32) or the limit larger",
        )
    ]


def concerns(config: Config, metrics: Sequence[dict[str, Any]], spans: Sequence[dict[str, Any]]) -> list[Concern]:
    """The warnings for the lines of `metrics.jsonl` and `spans.jsonl` so far."""
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
    where = "at its minimum, z = 0," if z_NLH.max() < _STILL else f"at z = {z_NLH[-1].mean():.1f} on average"
    return Concern(
        "frozen",
        f"spans are frozen: since step {later[0]['step']:,} every head has stayed {where} and moved less than {_STILL} "
        "positions",
        f"Try a smaller penalty (config.span.penalty is {config.span.penalty:g}) or a higher learning rate "
        f"(config.train.learning_rate is {config.train.learning_rate:g}): spans have the same learning rate as all "
        "parameters. If dev bits still improve, short spans may be sufficient for this text and model size",
    )


def _saturated(config: Config, spans: Sequence[dict[str, Any]]) -> Concern | None:
    limit = config.span.limit
    z_LH = np.array(spans[-1]["z_LH"])
    full = int((head_spans(z_LH, config.span.ramp, limit) >= limit).sum())
    # If the ramp alone reaches the limit, spans cannot saturate.
    if limit <= config.span.ramp or full < _SATURATED_SHARE * z_LH.size:
        return None
    return Concern(
        "saturated",
        f"spans are saturated: {full} of {counted(z_LH.size, 'head')} read all S = {counted(limit, 'position')} at "
        f"step {spans[-1]['step']:,}",
        f"Try a larger limit (config.span.limit, in a new run), or, if spans should be shorter, a larger penalty "
        f"(config.span.penalty is {config.span.penalty:g})",
    )


def _penalty_dominates(config: Config, metrics: Sequence[dict[str, Any]]) -> Concern | None:
    # After a non-finite step, numbers may be missing.
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
