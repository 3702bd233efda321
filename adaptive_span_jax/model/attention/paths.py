"""Which path computes the attention: the one that was asked for, or the fastest that can."""

from typing import NamedTuple, Protocol

import jax
from jax.typing import DTypeLike

from adaptive_span_jax.config import Config
from adaptive_span_jax.model.attention import fused, per_head, reference
from adaptive_span_jax.model.memory import ring_rows
from adaptive_span_jax.runtime import sharding


class Path(Protocol):
    """The interface of a path: a module with the signature of `reference.attend`."""

    def attend(self, query_BTHK: jax.Array, /, *args: object, **kwargs: object) -> jax.Array:
        """Each head's weighted average of the values it sees: output_BTHK."""
        ...


class Choice(NamedTuple):
    """A path and, where it is not the fused kernels, why not."""

    name: str
    reason: str | None = None


_MODULES = {"fused": fused, "per_head": per_head, "plain": reference}


def choose(
    asked: str, segment: int, width: int, heads: int, limit: int, ring: int, dtype: DTypeLike, platform: str
) -> Choice:
    """The path of `model.attention` for one layer's sizes; on its own, fused where it can be."""
    if asked != "auto":
        return Choice(asked, None if asked == "fused" else "as configured")
    reason = "no TPU" if platform != "tpu" else fused.unsupported(segment, width, heads, limit, ring, dtype)
    return Choice("per_head", reason) if reason else Choice("fused")


def choose_for(config: Config, platform: str) -> Choice:
    """The path that a run takes."""
    sizes, segment, limit = config.model, config.train.segment, config.span.limit
    ring = ring_rows(limit, segment)
    return choose(sizes.attention, segment, sizes.width, sizes.heads, limit, ring, sizes.compute_dtype, platform)


def path(asked: str, segment: int, width: int, heads: int, limit: int, ring: int, dtype: DTypeLike) -> Path:
    """The module of the chosen path, on the platform that is traced for."""
    return _MODULES[choose(asked, segment, width, heads, limit, ring, dtype, sharding.platform()).name]
