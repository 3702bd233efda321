"""A model whose weights no longer change: token ids and key-value cache in, logits and cache out.

The same numbers as `model.apply`, at the cost of what each head reads and of each position's projection once. Layers
differ in their heads' reach and are therefore not scanned but written out, each compiled for the reach of its heads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from adaptive_span_jax import head_reach, model, sharding
from adaptive_span_jax.config import Config
from adaptive_span_jax.key_value_cache import KeyValueCache, Rings
from adaptive_span_jax.layer import Layer
from adaptive_span_jax.linear import linear
from adaptive_span_jax.model import LAYERS, Params


@dataclasses.dataclass(frozen=True, eq=False)
class FinishedModel:
    """A config, weights with one tree per layer, and what follows from them."""

    config: Config
    weights: Params
    plan: head_reach.Plan

    @classmethod
    def of(cls, config: Config, params: Params) -> "FinishedModel":
        """From the parameters of training, whose layers are stacked."""
        # Taken apart here, once: a slice of the stack would be copied at every call.
        layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params[LAYERS]) for i in range(config.model.layers)]
        return cls(config, params | {LAYERS: layers}, head_reach.plan(config, jax.device_get(params)))

    def empty_cache(self, streams: int, mesh: Mesh, first: int = 0) -> KeyValueCache:
        """The cache of streams that have seen nothing; `first` positions of their first chunk are padding."""
        make = functools.partial(self.cache_of, streams)
        return jax.jit(make, out_shardings=self.cache_sharding(streams, mesh))(np.int32(first))

    def cache_of(self, streams: int, first: ArrayLike) -> KeyValueCache:
        """`empty_cache` wherever JAX puts it; for tracing."""
        dtype = jnp.dtype(self.config.model.compute_dtype)
        return KeyValueCache.empty(self.plan, streams, self.config.head_width, dtype, first)

    def cache_sharding(self, streams: int, mesh: Mesh) -> Any:
        """Where a cache's arrays lie. What reads a chunk must leave the next cache there, or it is compiled twice."""
        at: Any = KeyValueCache
        everywhere = sharding.replicated(mesh)
        return at(sharding.by_stream(mesh, streams), sharding.by_stream(mesh, streams), everywhere, everywhere)

    def read(
        self, weights: Params, tokens_BT: ArrayLike, cache: KeyValueCache
    ) -> tuple[jax.Array, KeyValueCache, jax.Array]:
        """(logits_BTV, the cache after these tokens, z_LBTH as in `model.Prediction`). Pure.

        T divides `head_reach.CHUNK` or is a multiple of it. `weights` are this model's own, handed in because a
        compiled function should not contain them.
        """
        hidden_BTD = model.embed(self.config, weights, tokens_BT)
        keys, values, spans = [], [], []
        for index, groups in enumerate(self.plan):
            layer = model.make_layer(self.config, weights[LAYERS][index])
            hidden_BTD, layer_keys, layer_values, z_BTH = self._read_layer(
                layer, groups, hidden_BTD, weights["positions_SK"], cache, index
            )
            keys.append(layer_keys)
            values.append(layer_values)
            spans.append(z_BTH)
        length = hidden_BTD.shape[1]
        cache = KeyValueCache(tuple(keys), tuple(values), cache.position + length, cache.first)
        return model.output(weights, hidden_BTD), cache, jnp.stack(spans)

    def _read_layer(
        self,
        layer: Layer,
        groups: tuple[head_reach.HeadGroup, ...],
        hidden_BTD: jax.Array,
        positions_SK: jax.Array,
        cache: KeyValueCache,
        index: int,
    ) -> tuple[jax.Array, Any, Any, jax.Array]:
        dtype, attention = hidden_BTD.dtype, layer.attention
        z_BTH = attention.span(hidden_BTD)
        query_BTHK, key_BTHK, value_BTHK = (
            linear(hidden_BTD, weight[...].astype(dtype))
            for weight in (attention.query_DHK, attention.key_DHK, attention.value_DHK)
        )
        keys, values, outputs = [], [], []
        for number, group in enumerate(groups):
            heads = np.array(group.heads)
            output_BTHK, rings = Rings(cache.keys[index][number], cache.values[index][number]).read(
                query_BTHK[:, :, heads],
                key_BTHK[:, :, heads],
                value_BTHK[:, :, heads],
                positions_SK.astype(dtype),
                z_BTH[:, :, heads],
                cache.position,
                cache.first,
                ramp=self.config.span.ramp,
                mask_empty=self.config.model.mask_empty_memory,
            )
            outputs.append(output_BTHK)
            keys.append(rings.key_BHMK)
            values.append(rings.value_BHMK)
        order = np.argsort(np.concatenate([group.heads for group in groups]))
        output_BTHK = jnp.concatenate(outputs, axis=2)[:, :, order]
        attended_BTD = linear(output_BTHK, attention.output_HKD[...].astype(dtype), 2)
        hidden_BTD = layer.attention_norm(hidden_BTD + attended_BTD)
        hidden_BTD = layer.feedforward_norm(hidden_BTD + layer.feedforward(hidden_BTD))
        return hidden_BTD, tuple(keys), tuple(values), z_BTH
