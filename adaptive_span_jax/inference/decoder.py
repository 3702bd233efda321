"""The decoder, a model with fixed weights. In: token ids and a KV cache. Out: logits and the next KV cache.

The results equal those of `transformer.apply`. Each head costs what it reads, and each position is projected once.
Layers are unrolled rather than scanned, because each is compiled for the reach of its heads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from adaptive_span_jax.config import Config
from adaptive_span_jax.inference import cache_plan
from adaptive_span_jax.inference.cache import KVCache, Rings
from adaptive_span_jax.model import transformer
from adaptive_span_jax.model.layers import SpanAttention
from adaptive_span_jax.model.linear import linear
from adaptive_span_jax.model.transformer import LAYERS, Params
from adaptive_span_jax.runtime import sharding


@dataclasses.dataclass(frozen=True, eq=False)
class CachedDecoder:
    """A config, weights with one tree per layer, and the cache plan that follows from them."""

    config: Config
    weights: Params
    plan: cache_plan.CachePlan

    @classmethod
    def of(cls, config: Config, params: Params) -> "CachedDecoder":
        """The decoder of trained parameters, whose layers are stacked."""
        # Unstacked once, here: slices of the stack would be copied at every call.
        layers = [jax.tree.map(lambda leaf, i=i: leaf[i], params[LAYERS]) for i in range(config.model.layers)]
        return cls(config, params | {LAYERS: layers}, cache_plan.plan(config, jax.device_get(params)))

    def empty_cache(self, streams: int, mesh: Mesh, padding: int = 0) -> KVCache:
        """An empty cache for streams whose first `padding` tokens will be padding."""
        make = functools.partial(self.cache_of, streams)
        return jax.jit(make, out_shardings=self.cache_sharding(streams, mesh))(np.int32(padding))

    def cache_of(self, streams: int, padding: ArrayLike) -> KVCache:
        """`empty_cache` without shardings, for tracing."""
        dtype = jnp.dtype(self.config.model.compute_dtype)
        return KVCache.empty(self.plan, streams, self.config.head_width, dtype, padding)

    def cache_sharding(self, streams: int, mesh: Mesh) -> Any:
        """The shardings of a cache. A compiled step must return its cache with them, or the next call recompiles."""
        shardings: Any = KVCache
        by_stream, replicated = sharding.by_stream(mesh, streams), sharding.replicated(mesh)
        return shardings(by_stream, by_stream, replicated, replicated)

    def read(self, weights: Params, tokens_BT: ArrayLike, cache: KVCache) -> tuple[jax.Array, KVCache, jax.Array]:
        """(logits_BTV, the cache after these tokens, z_LBTH as in `transformer.Prediction`). Pure.

        T divides `cache_plan.CHUNK` or is a multiple of it. `weights` are the decoder's own; they are an argument so
        that a compiled function does not embed them as constants.
        """
        hidden_BTD = transformer.embed(self.config, weights, tokens_BT)
        keys, values, z = [], [], []
        for index in range(self.config.model.layers):
            layer = transformer.make_layer(self.config, weights[LAYERS][index])
            attend = functools.partial(self._attend, layer.attention, index, weights["positions_SK"], cache)
            hidden_BTD, (layer_keys, layer_values, z_BTH) = layer.around(attend, hidden_BTD)
            keys.append(layer_keys)
            values.append(layer_values)
            z.append(z_BTH)
        length = hidden_BTD.shape[1]
        cache = KVCache(tuple(keys), tuple(values), cache.position + length, cache.valid_length + length)
        return transformer.output(weights, hidden_BTD), cache, jnp.stack(z)

    def _attend(
        self, attention: SpanAttention, index: int, positions_SK: jax.Array, cache: KVCache, hidden_BTD: jax.Array
    ) -> tuple[jax.Array, tuple[Any, Any, jax.Array]]:
        """(the attention's output_BTD, (the layer's keys and values of the next cache, z_BTH))."""
        dtype = hidden_BTD.dtype
        z_BTH = attention.span(hidden_BTD)
        query_BTHK, key_BTHK, value_BTHK = (
            linear(hidden_BTD, weight[...].astype(dtype))
            for weight in (attention.query_DHK, attention.key_DHK, attention.value_DHK)
        )
        # Padding leaves its rows of the rings empty.
        real_T = cache.valid_length + jnp.arange(hidden_BTD.shape[1]) >= 0
        key_BTHK, value_BTHK = (jnp.where(real_T[None, :, None, None], array, 0) for array in (key_BTHK, value_BTHK))
        keys, values, groups = [], [], []
        for number, group in enumerate(self.plan[index]):
            heads = np.array(group.heads)
            in_context, rings = Rings(cache.keys[index][number], cache.values[index][number]).extend(
                query_BTHK[:, :, heads],
                key_BTHK[:, :, heads],
                value_BTHK[:, :, heads],
                positions_SK.astype(dtype),
                z_BTH[:, :, heads],
                cache.position,
                ramp=self.config.span.ramp,
                valid_length=cache.valid_length if self.config.model.mask_empty_memory else None,
            )
            groups.append(in_context)
            keys.append(rings.key_BHMK)
            values.append(rings.value_BHMK)
        order = np.argsort(np.concatenate([group.heads for group in self.plan[index]]))
        output_BTHK, log_sum_BTH = (jnp.concatenate(parts, axis=2)[:, :, order] for parts in zip(*groups, strict=True))
        output_BTHK = attention.with_persistent(query_BTHK, (output_BTHK, log_sum_BTH))
        output_BTD = linear(output_BTHK, attention.output_HKD[...].astype(dtype), 2)
        return output_BTD, (tuple(keys), tuple(values), z_BTH)
