"""The Transformer: token ids and memory in, logits of the next token and the next inputs of memory out.

Outside this file parameters are a plain nested dict, so checkpoints can be read without a framework. Layers are stacked
along a leading axis and scanned, so compile time does not grow with depth. Flax modules are built from the dict while
tracing (`nnx.merge`); none is stored.

    embedding_VD                       input embedding, N(0, 1), not scaled
    positions_SK                       row x − 1 is p_x; one table for all heads and layers, N(0, 1)
    layers/attention/{query,key,value}_DHK, output_HKD
    layers/attention/span/…            depends on the kind of span
    layers/attention/persistent/{key_HKU, value_HUK}    with model.persistent; then there is no feed-forward
    layers/attention_norm/{scale,bias}, layers/feedforward_norm/{scale,bias}
    layers/feedforward/{expand_DF, expand_bias_F, contract_FD, contract_bias_D}
    output_DV, output_bias_V           output layer, not tied to the input embedding
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from adaptive_span_jax.config import Config
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.layers import FeedForward, Layer, SpanAttention, uniform
from adaptive_span_jax.model.memory import Memory
from adaptive_span_jax.model.span import make_span
from adaptive_span_jax.runtime import sharding

Params = dict[str, Any]

# Everything below this key of the parameters has a leading axis of layers.
LAYERS = "layers"


class Prediction(NamedTuple):
    """The model's outputs for one segment."""

    logits_BTV: jax.Array
    inputs_LBTD: jax.Array  # every layer's input, for `Memory.advance`
    penalty: jax.Array  # the mean span in positions, summed over layers; the loss multiplies it by lambda
    z_LBTH: jax.Array  # each head's z in positions; B and T are 1 where it is the same for all tokens


def param_dtype(config: Config) -> DTypeLike:
    """The dtype of parameters, optimizer state and sums: float32 at least, whatever the compute dtype."""
    return jnp.promote_types(config.model.compute_dtype, jnp.float32)


def init(config: Config, vocabulary: int, key: jax.Array) -> Params:
    """Initial parameters."""
    dtype = param_dtype(config)
    embedding_key, positions_key, output_key, bias_key, layers_key = jax.random.split(key, 5)
    width = config.model.width

    def init_layer(layer_key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(_layer(config, nnx.Rngs(layer_key))))

    return {
        "embedding_VD": jax.random.normal(embedding_key, (vocabulary, width), dtype),
        "positions_SK": jax.random.normal(positions_key, (config.span.limit, config.head_width), dtype),
        LAYERS: jax.vmap(init_layer)(jax.random.split(layers_key, config.model.layers)),
        "output_DV": uniform(output_key, (width, vocabulary), width, dtype)[...],
        "output_bias_V": uniform(bias_key, (vocabulary,), width, dtype)[...],
    }


def init_memory(config: Config, streams: int) -> Memory:
    """The memory of streams that have seen nothing."""
    sizes = config.model
    dtype = jnp.dtype(sizes.memory_dtype or sizes.compute_dtype)
    return Memory.zeros(sizes.layers, streams, config.span.limit, config.train.segment, sizes.width, dtype)


def apply(
    config: Config, params: Params, tokens_BT: ArrayLike, memory: Memory, dropout: Dropout | None = None
) -> Prediction:
    """The outputs for one segment of every stream; without `dropout` nothing is dropped."""
    valid_length = memory.valid_length if config.model.mask_empty_memory else None
    tokens_BT = jnp.asarray(tokens_BT)
    limit, segment = config.span.limit, tokens_BT.shape[1]
    common = sharding.all_gather({name: leaf for name, leaf in params.items() if name != LAYERS})
    hidden_BTD = embed(config, common, tokens_BT)

    def read_layer(hidden_BTD: jax.Array, indexed: tuple[jax.Array, Params]) -> tuple[jax.Array, tuple]:
        index, layer_params = indexed
        layer = make_layer(config, sharding.all_gather(layer_params))
        next_BTD, z_BTH = layer(
            hidden_BTD,
            memory.layer(index, limit, segment),  # not a scanned input: XLA would copy the whole memory
            common["positions_SK"],
            valid_length=valid_length,
            dropout=dropout.at(index) if dropout else None,
        )
        return next_BTD, (hidden_BTD, layer.attention.penalty(z_BTH), z_BTH)

    if config.model.remat:
        read_layer = jax.checkpoint(read_layer, prevent_cse=False)  # inside a scan, CSE cannot undo it
    layers = jnp.arange(config.model.layers)
    stacked = _cast_matrices(params[LAYERS], hidden_BTD.dtype)
    hidden_BTD, (inputs_LBTD, penalty_L, z_LBTH) = jax.lax.scan(read_layer, hidden_BTD, (layers, stacked))

    inputs_LBTD, z_LBTH = jax.lax.stop_gradient((inputs_LBTD, z_LBTH))
    return Prediction(output(common, hidden_BTD), inputs_LBTD, penalty_L.sum(), z_LBTH)


def _cast_matrices(layers: Params, dtype: DTypeLike) -> Params:
    """The layers' parameters, with what hidden states are multiplied by in their dtype.

    A layer would cast its own, but then its cast weights are stored for the backward pass once more, and gradients of
    all layers are stored in float32 although each was computed in bfloat16.
    """

    def cast(path: tuple, leaf: jax.Array) -> jax.Array:
        # Spans are computed in float32 at least, like LayerNorm, which has only vectors.
        is_matrix = leaf.ndim > 2 and not any(key.key == "span" for key in path)
        return leaf.astype(dtype) if is_matrix else leaf

    return jax.tree_util.tree_map_with_path(cast, layers)


def embed(config: Config, params: Params, tokens_BT: ArrayLike) -> jax.Array:
    """The first layer's input: hidden_BTD."""
    return _look_up(jnp.dtype(config.model.compute_dtype), params["embedding_VD"], jnp.asarray(tokens_BT))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(dtype: DTypeLike, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    return table_VD[tokens_BT].astype(dtype)


def _look_up_forward(
    dtype: DTypeLike, table_VD: jax.Array, tokens_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _look_up(dtype, table_VD, tokens_BT), (table_VD, tokens_BT)


def _look_up_backward(
    dtype: DTypeLike, residuals: tuple[jax.Array, jax.Array], d_rows_BTD: jax.Array
) -> tuple[jax.Array, None]:
    # The sum of each token's rows as a product with zeros and ones: 6,000 cycles on a TPU, row after row 40,000.
    table_VD, tokens_BT = residuals
    one_hot_BTV = jax.nn.one_hot(tokens_BT, table_VD.shape[0], dtype=dtype)
    d_table_VD = jnp.einsum(
        "BTV,BTD->VD",
        one_hot_BTV,
        d_rows_BTD,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=table_VD.dtype,
    )
    return d_table_VD, None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def make_layer(config: Config, layer_params: Params) -> Layer:
    """One layer, from its slice of the stacked parameters; for use while tracing."""
    return nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: _layer(config, nnx.Rngs(0)))), layer_params)


def output(params: Params, hidden_BTD: jax.Array) -> jax.Array:
    """logits_BTV, in float32 at least, like the loss: that of a good model is a small difference of large numbers."""
    weight_DV = params["output_DV"]
    logits_BTV = jnp.einsum(
        "BTD,DV->BTV", hidden_BTD, weight_DV.astype(hidden_BTD.dtype), preferred_element_type=weight_DV.dtype
    )
    return logits_BTV + params["output_bias_V"][None, None, :]


def mean_attention(
    config: Config, params: Params, inputs_LBTD: jax.Array, memory: Memory
) -> tuple[jax.Array, jax.Array]:
    """(attention by distance, averaged over streams and tokens: weight_LHS, column x − 1 for distance x; z_LBTH).

    For these inputs of the layers after this memory, by the reference attention.
    """
    limit, (_, streams, segment, _) = config.span.limit, inputs_LBTD.shape
    valid_length = memory.valid_length if config.model.mask_empty_memory else None

    def look(_: None, indexed: tuple[jax.Array, jax.Array, Params]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        index, hidden_BTD, layer_params = indexed
        layer = make_layer(config, layer_params)
        memory_BSD = memory.layer(index, limit, segment).to_array()
        weight_BHTS, z_BTH = layer.attention.weights(hidden_BTD, memory_BSD, params["positions_SK"], valid_length)
        z_BTH = jnp.broadcast_to(z_BTH, (streams, segment, config.model.heads))
        return None, (weight_BHTS.mean(axis=(0, 2))[:, ::-1], z_BTH)

    layers = jnp.arange(config.model.layers)
    return jax.lax.scan(look, None, (layers, inputs_LBTD, params[LAYERS]))[1]


def parameter_count(params: Params) -> int:
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _layer(config: Config, rngs: nnx.Rngs) -> Layer:
    dtype = param_dtype(config)
    sizes = config.model
    attention = SpanAttention(
        sizes.width,
        sizes.heads,
        make_span(config.span, sizes.width, sizes.heads, dtype),
        ramp=config.span.ramp,
        path=sizes.attention,
        persistent=sizes.persistent,
        rngs=rngs,
        dtype=dtype,
    )
    if sizes.persistent:
        return Layer(attention, None)
    return Layer(attention, FeedForward(sizes.width, sizes.feedforward, rngs=rngs, dtype=dtype))
