"""Checks whether the streams of a decoder fit into memory before anything is allocated."""

from typing import Any

import jax
from jax.sharding import Mesh

from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.runtime.capacity import activation_bytes, check, model_fields, named_fields, placed


def check_reading(decoder: CachedDecoder, streams: int, positions: int, mesh: Mesh, field: str) -> None:
    """Raises if memory is too small for the streams, a number set by `field`; `positions` are read at once."""
    config = decoder.config
    shapes = jax.eval_shape(lambda: decoder.cache_of(streams, 0))
    cache = jax.tree.map(placed, shapes, _broadcast(decoder.cache_sharding(streams, mesh), shapes))
    vocabulary = decoder.weights["embedding_VD"].shape[0]
    sizes = model_fields(config)
    check(
        mesh,
        f"{field} = {streams}",
        {
            f"parameters ({sizes}, {named_fields(config, 'span.limit')})": sharding.total_bytes(decoder.weights),
            f"keys and values ({field} = {streams}, {named_fields(config, 'model.layers', 'model.width')}, and the "
            f"spans of the heads, at most {named_fields(config, 'span.limit')})": sharding.bytes_per_device(cache),
            f"activations ({field} = {streams}, {sizes})": activation_bytes(
                config, mesh, streams, positions, vocabulary
            ),
        },
    )


def _broadcast(prefix: Any, tree: Any) -> Any:
    """A tree with one sharding per leaf, from a prefix of it."""
    return jax.tree.map(lambda leaf, branch: jax.tree.map(lambda _: leaf, branch), prefix, tree)
