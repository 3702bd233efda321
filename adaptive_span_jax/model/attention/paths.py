"""Which path computes the attention: the one that was asked for, or the fastest that can."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model.attention import fused, per_head, persistent, reference
from adaptive_span_jax.model.attention.fused import persistent as fused_persistent
from adaptive_span_jax.model.memory import ring_rows
from adaptive_span_jax.runtime import sharding


class Choice(NamedTuple):
    """A path and, where it is not the fused kernels alone, why not."""

    name: str
    reason: str | None = None


class Path(NamedTuple):
    """The functions of a path."""

    attend: Callable[..., tuple[jax.Array, jax.Array]]  # as reference.attend
    join: Callable[..., jax.Array]  # as persistent.join


_PATHS = {"fused": fused.attend, "per_head": per_head.attend, "plain": reference.attend}


def choose(
    asked: str,
    segment: int,
    width: int,
    heads: int,
    limit: int,
    ring: int,
    dtype: DTypeLike,
    platform: str,
    persistent_vectors: int = 0,
) -> Choice:
    """The path of `model.attention` for one layer's sizes; on its own, fused where it can be."""
    unsupported = fused.unsupported(segment, width, heads, limit, ring, dtype)
    if asked == "fused" and unsupported:
        raise UserError(f"config.model.attention is fused, but {unsupported}; use auto or per_head")
    if asked == "fused" or (asked == "auto" and platform == "tpu" and not unsupported):
        by_xla = fused_persistent.unsupported(segment, width // heads, persistent_vectors, dtype)
        return Choice("fused", by_xla and f"persistent vectors by XLA: {by_xla}")
    if asked == "auto":
        return Choice(
            "per_head", unsupported if platform == "tpu" else f"the fused kernels are for TPUs, not {platform}"
        )
    return Choice(asked, f"model.attention = {asked}")


def choose_for(config: Config, platform: str) -> Choice:
    """The path that a run takes."""
    sizes, segment, limit = config.model, config.train.segment, config.span.limit
    ring = ring_rows(limit, segment)
    return choose(
        sizes.attention,
        segment,
        sizes.width,
        sizes.heads,
        limit,
        ring,
        sizes.compute_dtype,
        platform,
        sizes.persistent,
    )


def describe(choice: Choice) -> str:
    """A path in words, and why it is not the fused kernels alone."""
    words = {"fused": "fused TPU kernels", "per_head": "per head, by XLA", "plain": "plain reference"}[choice.name]
    return words if choice.reason is None else f"{words} ({choice.reason})"


def path_of(
    asked: str, segment: int, width: int, heads: int, limit: int, ring: int, dtype: DTypeLike, persistent_vectors: int
) -> Path:
    """The chosen path, on the platform that is traced for."""
    platform = sharding.platform()
    choice = choose(asked, segment, width, heads, limit, ring, dtype, platform, persistent_vectors)
    by_kernel = choice == Choice("fused")
    return Path(_PATHS[choice.name], fused_persistent.join if by_kernel else persistent.join)
