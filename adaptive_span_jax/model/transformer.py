"""The Transformer: token ids and memory in, logits of the next token and the next inputs of memory out.

Outside this file parameters are a plain nested dict, so checkpoints can be read without a framework. Layers are stacked
along a leading axis and scanned, so compile time does not grow with depth. Flax modules are built from the dict while
tracing (`nnx.merge`); none is stored.

Sublayers run in the order s^k (sf)^(n−k) f^k, k = `model.sandwich`: feed-forward sublayers lag k turns behind. Turn t
runs attention sublayer t if t < n, then feed-forward sublayer t − k if t ≥ k. Turns with the same sublayers are one
scan (`scans`): one if k = 0, else three. A sublayer's parameters, memory and dropout are those of its own index.

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
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from adaptive_span_jax.config import Config
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.layers import AttentionSublayer, FeedForward, FeedForwardSublayer, SpanAttention, uniform
from adaptive_span_jax.model.memory import Memory
from adaptive_span_jax.model.span import make_span
from adaptive_span_jax.runtime import sharding

Params = dict[str, Any]
Sublayer = TypeVar("Sublayer", AttentionSublayer, FeedForwardSublayer)

# Everything below this key of the parameters has a leading axis of layers.
LAYERS = "layers"

# The parts of a layer's parameters, by the sublayer they belong to.
_ATTENTION, _FEEDFORWARD = ("attention", "attention_norm"), ("feedforward", "feedforward_norm")


class Prediction(NamedTuple):
    """The model's outputs for one segment."""

    logits_BTV: jax.Array
    inputs_LBTD: jax.Array  # every attention sublayer's input, for `Memory.advance`
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
        rngs = nnx.Rngs(layer_key)
        attention = nnx.to_pure_dict(nnx.state(_attention(config, rngs)))
        if config.model.persistent:
            return attention
        return attention | nnx.to_pure_dict(nnx.state(_feedforward(config, rngs)))

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
    limit, segment, lag = config.span.limit, tokens_BT.shape[1], config.model.sandwich
    common = sharding.all_gather({name: leaf for name, leaf in params.items() if name != LAYERS})
    hidden_BTD = embed(config, common, tokens_BT)

    def read(hidden_BTD: jax.Array, indexed: tuple[jax.Array, Params]) -> tuple[jax.Array, tuple | None]:
        turn, turn_params = indexed[0], sharding.all_gather(indexed[1])
        in_turn = dropout.at(turn) if dropout else None
        lagging = dropout.at(turn - lag) if dropout and lag else in_turn
        if "attention" not in turn_params:
            return make_feedforward(config, turn_params)(hidden_BTD, lagging), None
        sublayer = make_attention(config, turn_params)
        next_BTD, z_BTH = sublayer(
            hidden_BTD,
            memory.layer(turn, limit, segment),  # not a scanned input: XLA would copy the whole memory
            common["positions_SK"],
            valid_length=valid_length,
            dropout=in_turn,
        )
        if "feedforward" in turn_params:
            next_BTD = make_feedforward(config, turn_params)(next_BTD, lagging)
        return next_BTD, (hidden_BTD, sublayer.attention.penalty(z_BTH), z_BTH)

    if config.model.remat:
        read = jax.checkpoint(read, prevent_cse=False)  # inside a scan, CSE cannot undo it
    stacked = _cast_matrices(params[LAYERS], hidden_BTD.dtype)
    parts = []
    for turns in scans(config):
        scanned = jnp.arange(turns.start, turns.stop), _in_turns(config, stacked, turns)
        with jax.named_scope(scan_scope(turns)):
            hidden_BTD, found = jax.lax.scan(read, hidden_BTD, scanned)
        if found is not None:
            parts.append(found)
    inputs_LBTD, penalty_L, z_LBTH = jax.tree.map(lambda *each: _concatenate(each), *parts)

    inputs_LBTD, z_LBTH = jax.lax.stop_gradient((inputs_LBTD, z_LBTH))
    return Prediction(output(common, hidden_BTD), inputs_LBTD, penalty_L.sum(), z_LBTH)


def scans(config: Config) -> list[range]:
    """The turns of every scan over sublayers, in order of execution."""
    layers, lag = config.model.layers, config.model.sandwich
    return [turns for turns in (range(lag), range(lag, layers), range(layers, layers + lag)) if turns]


def scan_scope(turns: range) -> str:
    """What compiled programs call the scan over these turns."""
    return f"turns_{turns.start}_{turns.stop}"


def turns_in_scope(config: Config, scope: str) -> range | None:
    """The turns of the scan that something in a compiled program comes from, by its scope; None if from no scan."""
    return next((turns for turns in scans(config) if re.search(rf"\b{scan_scope(turns)}\b", scope)), None)


def _in_turns(config: Config, stacked: Params, turns: range) -> Params:
    """The parameters of the sublayers that run in these turns, stacked."""

    def rows(names: tuple[str, ...], first: int) -> Params:
        part = {name: stacked[name] for name in names}
        # Not even a slice of all of it, which might be a copy.
        whole = len(turns) == config.model.layers
        return part if whole else jax.tree.map(lambda leaf: leaf[first : first + len(turns)], part)

    lag = config.model.sandwich
    attention = rows(_ATTENTION, turns.start) if turns.start < config.model.layers else {}
    has_feedforward = turns.start >= lag and not config.model.persistent
    feedforward = rows(_FEEDFORWARD, turns.start - lag) if has_feedforward else {}
    return attention | feedforward


def _concatenate(parts: tuple[jax.Array, ...]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


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


def make_attention(config: Config, layer_params: Params) -> AttentionSublayer:
    """An attention sublayer, from its slice of the stacked parameters; for use while tracing."""
    return _merge(lambda: _attention(config, nnx.Rngs(0)), {name: layer_params[name] for name in _ATTENTION})


def make_feedforward(config: Config, layer_params: Params) -> FeedForwardSublayer:
    """The same for a feed-forward sublayer."""
    return _merge(lambda: _feedforward(config, nnx.Rngs(0)), {name: layer_params[name] for name in _FEEDFORWARD})


def _merge(make: Callable[[], Sublayer], params: Params) -> Sublayer:
    return nnx.merge(nnx.graphdef(nnx.eval_shape(make)), params)


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

    For these inputs of the attention sublayers after this memory, by the reference attention.
    """
    limit, (_, streams, segment, _) = config.span.limit, inputs_LBTD.shape
    valid_length = memory.valid_length if config.model.mask_empty_memory else None

    def look(_: None, indexed: tuple[jax.Array, jax.Array, Params]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        index, hidden_BTD, layer_params = indexed
        attention = make_attention(config, layer_params).attention
        memory_BSD = memory.layer(index, limit, segment).to_array()
        weight_BHTS, z_BTH = attention.weights(hidden_BTD, memory_BSD, params["positions_SK"], valid_length)
        z_BTH = jnp.broadcast_to(z_BTH, (streams, segment, config.model.heads))
        return None, (weight_BHTS.mean(axis=(0, 2))[:, ::-1], z_BTH)

    layers = jnp.arange(config.model.layers)
    return jax.lax.scan(look, None, (layers, inputs_LBTD, params[LAYERS]))[1]


def parameter_count(params: Params) -> int:
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _attention(config: Config, rngs: nnx.Rngs) -> AttentionSublayer:
    dtype = param_dtype(config)
    sizes = config.model
    return AttentionSublayer(
        SpanAttention(
            sizes.width,
            sizes.heads,
            make_span(config.span, sizes.width, sizes.heads, dtype),
            ramp=config.span.ramp,
            path=sizes.attention,
            persistent=sizes.persistent,
            rngs=rngs,
            dtype=dtype,
        )
    )


def _feedforward(config: Config, rngs: nnx.Rngs) -> FeedForwardSublayer:
    sizes = config.model
    return FeedForwardSublayer(FeedForward(sizes.width, sizes.feedforward, rngs=rngs, dtype=param_dtype(config)))
