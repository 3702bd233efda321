"""The decoder with its KV cache equals the model in training, for all spans and chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.inference import cache_plan
from adaptive_span_jax.inference.decoder import CachedDecoder
from adaptive_span_jax.model import transformer
from adaptive_span_jax.runtime import sharding
from tests.conftest import tiny_config

VOCABULARY, STREAMS, LENGTH = 11, 2, 192
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (STREAMS, LENGTH)).astype(np.int32)
KINDS = ["fixed", "adaptive", "dynamic"]
slow = pytest.mark.slow


def spread_model(kind="adaptive", limit=150, **fields):
    """A config and parameters whose heads read anything from the ramp to the limit."""
    config = tiny_config(
        span={"kind": kind, "limit": limit}, train={"segment": 32}, model={"attention": "plain", **fields}
    )
    params = transformer.init(config, VOCABULARY, jax.random.key(3))
    random = np.random.default_rng(5)
    span = params["layers"]["attention"].get("span", {})
    if kind == "adaptive":
        span["span_fraction_H"] = jnp.array([[0.0, 1.0], [0.31, 0.02], [0.5, 0.25]])
    if kind == "dynamic":
        span["weight_DH"] = jnp.asarray(random.normal(size=span["weight_DH"].shape), jnp.float32) / 3
        span["bias_H"] = jnp.asarray(random.normal(size=span["bias_H"].shape), jnp.float32) - 1
    for name in ("attention_norm", "feedforward_norm"):
        if name in params["layers"]:
            norm = params["layers"][name]
            norm["bias"] = jnp.asarray(random.normal(size=norm["bias"].shape), jnp.float32)
    return config, params


def oracle(config, params, tokens_BT=TOKENS):
    """Logits and spans by `model.apply`."""
    apply, memory = (
        jax.jit(functools.partial(transformer.apply, config)),
        transformer.init_memory(config, len(tokens_BT)),
    )
    logits, spans = [], []
    for start in range(0, tokens_BT.shape[1], config.train.segment):
        found = apply(params, tokens_BT[:, start : start + config.train.segment], memory)
        memory = memory.advance(found.inputs_LBTD, config.span.limit)
        logits.append(found.logits_BTV)
        spans.append(found.z_LBTH.mean(axis=(1, 2)))
    return np.concatenate(logits, axis=1), np.mean(spans, axis=0)


def read(config, params, chunks, tokens_BT=TOKENS, padding=0):
    """Logits and spans by the decoder, in chunks of these lengths."""
    decoder = CachedDecoder.of(config, params)
    step = jax.jit(decoder.read, donate_argnums=2)
    cache = decoder.empty_cache(len(tokens_BT), sharding.make_mesh(jax.devices()[:1]), padding)
    logits, spans, start = [], [], 0
    for length in chunks:
        found, cache, z_LBTH = step(decoder.weights, tokens_BT[:, start : start + length], cache)
        logits.append(found)
        spans.append(z_LBTH.mean(axis=(1, 2)))
        start += length
    assert start == tokens_BT.shape[1]
    return np.concatenate(logits, axis=1), np.average(spans, axis=0, weights=chunks)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        *((kind, {}) for kind in KINDS),
        *(("adaptive", {"sandwich": 3}), ("dynamic", {"sandwich": 1}), ("adaptive", {"persistent": 9})),
        *(pytest.param(kind, {"persistent": 9}, marks=slow) for kind in KINDS[::2]),
    ],
)
def test_same_numbers_as_the_model_in_training(kind, sizes):
    config, params = spread_model(kind, **sizes)
    expected, spans = oracle(config, params)
    found, found_spans = read(config, params, [128, *[1] * 64])  # two chunks at once
    assert_allclose(found, expected, atol=1e-5)
    assert_allclose(found_spans, spans, rtol=1e-4)


@pytest.mark.parametrize(
    ("limit", "persistent"), [(7, 0), pytest.param(64, 0, marks=slow), (65, 0), pytest.param(7, 9, marks=slow)]
)
def test_same_numbers_at_any_limit_even_without_empty_memory(limit, persistent):
    config, params = spread_model(limit=limit, mask_empty_memory=True, persistent=persistent)
    assert_allclose(read(config, params, [64] * 3)[0], oracle(config, params)[0], atol=1e-5)


def test_bfloat16_is_close():
    config, params = spread_model(compute_dtype="bfloat16")
    exact, _ = oracle(*spread_model())
    # Logits of about 1 and activations of 8 bits.
    assert_allclose(read(config, params, [64] * 3)[0], exact, atol=0.1)


@pytest.mark.parametrize("mask_empty_memory", [pytest.param(False, marks=slow), True])
def test_padding_in_front_leaves_no_trace(mask_empty_memory):
    config, params = spread_model(mask_empty_memory=mask_empty_memory)
    expected, _ = oracle(config, params)
    padding = np.full((STREAMS, 37), 5, np.int32)
    found, _ = read(config, params, [64] * 3 + [1] * 37, np.concatenate([padding, TOKENS], axis=1), padding=37)
    assert_allclose(found[:, 37:], expected, atol=1e-5)


def test_cache_is_only_as_long_as_heads_read():
    config, params = spread_model(limit=150)
    rows = [[(group.heads, group.rows) for group in groups] for groups in cache_plan.plan(config, params)]
    # Reaches: 6 and 150; 52 and 9; 81 and 43. A chunk of 64 besides, in multiples of it.
    assert rows == [[((0,), 128), ((1,), 256)], [((0, 1), 128)], [((1,), 128), ((0,), 192)]]


@pytest.mark.parametrize(
    ("sizes", "before"),  # attention sublayers 1 and 2: the LayerNorm whose output they get, and its number
    [
        ({}, [("feedforward_norm", 0), ("feedforward_norm", 1)]),
        ({"sandwich": 1}, [("attention_norm", 0), ("feedforward_norm", 0)]),
        ({"sandwich": 3}, [("attention_norm", 0), ("attention_norm", 1)]),
        ({"persistent": 9}, [("attention_norm", 0), ("attention_norm", 1)]),
    ],
)
def test_dynamic_reach_holds_for_every_input(sizes, before):
    config, params = spread_model("dynamic", **sizes)
    random, reach_LH = np.random.default_rng(7), cache_plan.head_reach(config, params)
    width = config.model.width
    for index in range(config.model.layers):
        layer_params = jax.tree.map(lambda leaf, i=index: np.asarray(leaf[i]), params["layers"])
        # The worst input of each head, and some others.
        normal = np.concatenate([layer_params["attention"]["span"]["weight_DH"].T, random.normal(size=(500, width))])
        if index:
            which, number = before[index - 1]
            norm = {name: np.asarray(leaf[number]) for name, leaf in params["layers"][which].items()}
            normal *= norm["scale"]
            normal *= np.sqrt(width) / np.linalg.norm(normal, axis=1, keepdims=True)
            inputs = normal * norm["scale"] + norm["bias"]
        else:
            inputs = np.asarray(params["embedding_VD"])
        z = transformer.make_attention(config, layer_params).attention.span(jnp.asarray(inputs, jnp.float32)[None])
        reach = np.minimum(np.floor(np.asarray(z)[0].max(axis=0) + config.span.ramp + 1), config.span.limit)
        assert (reach <= reach_LH[index]).all()
        assert (reach > 0.9 * reach_LH[index] - 1).all()  # and is not just the limit


def test_streams_on_eight_devices():
    config, params = spread_model()
    tokens = np.tile(TOKENS[:, :64], (4, 1))
    decoder = CachedDecoder.of(config, params)
    results = []
    for mesh in (sharding.make_mesh(jax.devices()[:1]), sharding.make_mesh()):
        cache = decoder.empty_cache(8, mesh)
        placed = sharding.place_segment(mesh, tokens)
        weights = jax.device_put(decoder.weights, sharding.replicated(mesh))
        logits, cache, _ = jax.jit(decoder.read)(weights, placed, cache)
        assert len(cache.keys[0][0].sharding.device_set) == mesh.size
        results.append(np.asarray(logits))
    assert_allclose(results[1], results[0], atol=1e-5)
    assert_array_equal(results[0][:2], results[0][2:4])
