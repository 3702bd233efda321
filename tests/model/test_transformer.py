"""The whole model against a float64 oracle written from the paper, and the properties that it must have."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.model import transformer
from adaptive_span_jax.model.attention import reference
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.memory import LayerMemory, Memory
from tests.conftest import tiny_config

KINDS = ("fixed", "adaptive", "dynamic")
# Kinds of span, and what else decides which sublayers there are and in which order, of 3 layers.
KINDS_AND_SIZES: list[tuple[str, dict]] = [
    *((kind, {}) for kind in KINDS),
    ("adaptive", {"sandwich": 1}),
    ("adaptive", {"persistent": 7}),
    *(("dynamic", {"sandwich": 2}), ("adaptive", {"sandwich": 3})),
    *((kind, {"persistent": 7}) for kind in ("fixed", "dynamic")),
]
VOCABULARY = 11
apply = jax.jit(transformer.apply, static_argnums=0)
TOKENS = np.random.default_rng(1).integers(0, VOCABULARY, (2, 52)).astype(np.int32)


def make(kind="adaptive", seed=0, **sections):
    """A config and parameters whose spans are all different."""
    config = tiny_config(span={"kind": kind} | sections.pop("span", {}), **sections)
    params = transformer.init(config, VOCABULARY, jax.random.key(seed))
    attention = params["layers"]["attention"]
    if kind == "adaptive":
        attention["span"]["span_fraction_H"] = jnp.asarray([[0, 0.5], [1, 0.13], [0.02, 0.8]][: config.model.layers])
    if kind == "dynamic":
        attention["span"]["weight_DH"] = jax.random.normal(jax.random.key(9), attention["span"]["weight_DH"].shape)
        attention["span"]["bias_H"] += 3
    return config, jax.tree.map(lambda leaf: leaf.astype(transformer.param_dtype(config)), params)


def oracle(config, params, tokens, memory_LBSD):
    """Logits, one position at a time, from the equations; memory oldest first. Answers also every layer's z."""
    p = jax.tree.map(np.asarray, params)
    limit, ramp, heads = config.span.limit, config.span.ramp, config.model.heads
    streams, length = tokens.shape
    hidden, all_z = p["embedding_VD"][tokens], []
    order = order_of(config)
    for place, kind in enumerate(order):
        number = order[:place].count(kind)
        layer = jax.tree.map(operator.itemgetter(number), p["layers"])
        assert ("feedforward" in layer) == ("f" in order)
        if kind == "f":
            f = layer["feedforward"]
            inner = np.maximum(hidden @ f["expand_DF"] + f["expand_bias_F"], 0)
            hidden = layer_norm(hidden + inner @ f["contract_FD"] + f["contract_bias_D"], **layer["feedforward_norm"])
            continue
        context = np.concatenate([memory_LBSD[number], hidden], axis=1)
        output = np.zeros_like(hidden)
        for b, t, h in np.ndindex(streams, length, heads):
            attention = layer["attention"]
            x = hidden[b, t]
            if config.span.kind == "fixed":
                z = float(limit)
            elif config.span.kind == "adaptive":
                z = limit * attention["span"]["span_fraction_H"][h]
            else:
                z = limit / (1 + np.exp(-(x @ attention["span"]["weight_DH"][:, h] + attention["span"]["bias_H"][h])))
            all_z.append(z)
            query = x @ attention["query_DHK"][:, h]
            weights, values = [], []
            for distance in range(1, limit + 1):
                past = context[b, limit + t - distance]
                key = past @ attention["key_DHK"][:, h] + p["positions_SK"][distance - 1]
                mask = np.clip((ramp + z + 1 - distance) / ramp, 0, 1)
                weights.append(mask * np.exp(query @ key / np.sqrt(query.size)))
                values.append(past @ attention["value_DHK"][:, h])
            for n in range(config.model.persistent):
                key = attention["persistent"]["key_HKU"][h, :, n] * np.sqrt(query.size)
                weights.append(np.exp(query @ key / np.sqrt(query.size)))
                values.append(attention["persistent"]["value_HUK"][h, n] * np.sqrt(config.model.persistent))
            output[b, t] += (np.array(weights) / np.sum(weights)) @ np.array(values) @ attention["output_HKD"][h]
        hidden = layer_norm(hidden + output, **layer["attention_norm"])
    return hidden @ p["output_DV"] + p["output_bias_V"], np.array(all_z)


def order_of(config):
    """The order of attention (s) and feed-forward (f) sublayers."""
    layers, k = config.model.layers, config.model.sandwich
    if config.model.persistent:
        return "s" * layers
    return "s" * k + "sf" * (layers - k) + "f" * k


def layer_norm(x, scale, bias):
    mean = x.mean(axis=-1, keepdims=True)
    return (x - mean) / (((x - mean) ** 2).mean(axis=-1, keepdims=True) + 1e-5) ** 0.5 * scale + bias


@pytest.mark.parametrize(("kind", "sizes"), KINDS_AND_SIZES)
def test_logits_equal_the_oracle(kind, sizes, x64):
    config, params = make(kind, model={"compute_dtype": "float64", **sizes}, train={"segment": 4})
    memory = transformer.init_memory(config, 2)
    stored = np.zeros((3, 2, config.span.limit, 22))
    first = apply(config, params, TOKENS[:, :4], memory)
    expected, z = oracle(config, params, TOKENS[:, :4], stored)
    assert_allclose(first.logits_BTV, expected, rtol=1e-10)
    assert_allclose(first.z_LBTH.mean(), z.mean(), rtol=1e-10)
    expected_penalty = 0 if kind == "fixed" else 3 * z.mean()
    assert_allclose(first.penalty, expected_penalty, rtol=1e-10)
    # The second segment reads the memory of the first: real states as well as zeros, which are attended to.
    memory = memory.advance(first.inputs_LBTD, config.span.limit)
    stored = np.stack([np.asarray(memory.layer(i, config.span.limit, 4).to_array()) for i in range(3)])
    assert_array_equal(stored[0, :, -4:], np.asarray(params["embedding_VD"])[TOKENS[:, :4]])
    assert_array_equal(stored[:, :, :-4], 0)
    second = apply(config, params, TOKENS[:, 4:8], memory)
    assert_allclose(second.logits_BTV, oracle(config, params, TOKENS[:, 4:8], stored)[0], rtol=1e-10)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [*KINDS_AND_SIZES[:5], *(pytest.param(*each, marks=pytest.mark.slow) for each in KINDS_AND_SIZES[5:])],
)
def test_one_long_segment_equals_short_ones_with_memory(kind, sizes, x64):
    def logits(segment):
        config, params = make(kind, model={"compute_dtype": "float64", **sizes}, train={"segment": segment})
        memory, found = transformer.init_memory(config, 2), []
        for first in range(0, 52, segment):
            prediction = apply(config, params, TOKENS[:, first : first + segment], memory)
            memory = memory.advance(prediction.inputs_LBTD, config.span.limit)
            found.append(prediction.logits_BTV)
        return np.concatenate(found, axis=1)

    assert_allclose(logits(13), logits(52), rtol=1e-9)
    assert_allclose(logits(1), logits(52), rtol=1e-9)


@pytest.mark.parametrize("sizes", [{}, {"sandwich": 2}, {"sandwich": 3}, {"persistent": 7}])
def test_no_gradient_from_the_future_nor_from_the_token_itself(sizes):
    config, params = make(model=sizes, train={"segment": 13})
    embedded_BTD = params["embedding_VD"][TOKENS[:, :13]]

    def logit(embedded_BTD, position):
        # Every token gets an embedding of its own, so that gradients tell positions apart.
        table = jnp.concatenate([embedded_BTD[0], embedded_BTD[1]])
        tokens = jnp.arange(26).reshape(2, 13)
        found = apply(config, params | {"embedding_VD": table}, tokens, transformer.init_memory(config, 2))
        return found.logits_BTV[0, position].sum()

    gradient_of = jax.jit(jax.grad(logit))
    for position in (0, 6, 12):
        gradient = np.abs(gradient_of(embedded_BTD, position)).sum(axis=2)
        assert_array_equal(gradient[1], 0)
        assert_array_equal(gradient[0, position + 1 :], 0)
        assert gradient[0, position] > 0
        if position:
            assert (gradient[0, :position] > 0).any()


def plain(config, params, tokens, memory_LBSD):
    """(logits, the mean span summed over layers) of adaptive spans in jax.numpy, sublayer after sublayer."""
    limit, ramp = config.span.limit, config.span.ramp
    length, order, penalty = tokens.shape[1], order_of(config), 0
    hidden = params["embedding_VD"][tokens]
    for place, kind in enumerate(order):
        layer = jax.tree.map(operator.itemgetter(order[:place].count(kind)), params["layers"])
        if kind == "f":
            f = layer["feedforward"]
            inner = jnp.maximum(hidden @ f["expand_DF"] + f["expand_bias_F"][None, None], 0)
            output, norm = inner @ f["contract_FD"] + f["contract_bias_D"][None, None], layer["feedforward_norm"]
        else:
            a = layer["attention"]
            context = jnp.concatenate([memory_LBSD[order[:place].count("s")], hidden], axis=1)
            # Row t: the positions at distances 1, 2, …, S from token t.
            seen = context[:, limit + np.arange(length)[:, None] - np.arange(1, limit + 1)[None]]
            z = limit * a["span"]["span_fraction_H"]
            penalty += z.mean()
            mask = jnp.clip((ramp + z[None] + 1 - np.arange(1, limit + 1)[:, None]) / ramp, 0, 1)
            query = jnp.einsum("BTD,DHK->BTHK", hidden, a["query_DHK"])
            key = jnp.einsum("BTSD,DHK->BTSHK", seen, a["key_DHK"]) + params["positions_SK"][None, None, :, None]
            weight = mask[None, None] * jnp.exp(jnp.einsum("BTHK,BTSHK->BTSH", query, key) / query.shape[-1] ** 0.5)
            weight /= weight.sum(axis=2, keepdims=True)
            value = jnp.einsum("BTSD,DHK->BTSHK", seen, a["value_DHK"])
            output = jnp.einsum("BTSH,BTSHK,HKD->BTD", weight, value, a["output_HKD"])
            norm = layer["attention_norm"]
        hidden = layer_norm(hidden + output, norm["scale"][None, None], norm["bias"][None, None])
    return hidden @ params["output_DV"] + params["output_bias_V"][None, None], penalty


@pytest.mark.parametrize(
    ("sandwich", "remat"),
    [(1, True), (3, False), *(pytest.param(k, False, marks=pytest.mark.slow) for k in (0, 2))],
)
def test_every_gradient_is_that_of_the_plain_model(sandwich, remat, x64):
    model = {"compute_dtype": "float64", "attention": "plain", "sandwich": sandwich, "remat": remat}
    config, params = make(model=model, train={"segment": 8})
    # At a z of 0 or S a gradient is one-sided.
    params["layers"]["attention"]["span"]["span_fraction_H"] = jnp.asarray([[0.1, 0.5], [0.9, 0.13], [0.02, 0.8]])
    memory = transformer.init_memory(config, 2)
    memory = memory.advance(apply(config, params, TOKENS[:, :8], memory).inputs_LBTD, config.span.limit)
    memory_LBSD = [memory.layer(index, config.span.limit, 8).to_array() for index in range(3)]

    def ours(params):
        found = transformer.apply(config, params, TOKENS[:, 8:16], memory)
        return found.logits_BTV.var() + found.penalty

    def expected(params):
        logits, penalty = plain(config, params, TOKENS[:, 8:16], memory_LBSD)
        return logits.var() + penalty

    value, gradients = jax.jit(jax.value_and_grad(ours))(params)
    expected_value, expected_gradients = jax.jit(jax.value_and_grad(expected))(params)
    assert_allclose(value, expected_value, rtol=1e-10)
    jax.tree.map(
        lambda found, wanted: assert_allclose(found, wanted, rtol=1e-7, atol=1e-10), gradients, expected_gradients
    )


@pytest.mark.parametrize(("sandwich", "lengths"), [(0, [3]), (1, [1, 2, 1]), (2, [2, 1, 2]), (3, [3, 3])])
def test_layers_are_scanned(sandwich, lengths):
    config, params = make(model={"sandwich": sandwich})
    traced = jax.make_jaxpr(functools.partial(transformer.apply, config))(
        params, TOKENS[:, :13], transformer.init_memory(config, 2)
    )
    scans = [each.params["length"] for each in traced.eqns if each.primitive.name == "scan"]
    assert scans == lengths
    assert [len(turns) for turns in transformer.scans(config)] == lengths


@pytest.mark.parametrize("silent", ["attention/output_HKD", "feedforward/contract_FD"])
def test_dropout_of_a_sublayer_depends_on_its_own_number(silent):
    """Sublayers of one kind add nothing, so that it does not matter where they are."""
    logits = []
    for sandwich in (0, 1, 3):
        config, params = make(model={"dropout": 0.4, "sandwich": sandwich})
        kind, name = silent.split("/")
        layers = params["layers"]
        layers[kind][name] *= 0
        layers["feedforward"]["contract_bias_D"] *= 0
        memory = transformer.init_memory(config, 2)
        logits.append(apply(config, params, TOKENS[:, :13], memory, Dropout.create(0.4, 1, 2)).logits_BTV)
    # LayerNorm of what is normalized already: the 1e-5 in it counts once more.
    assert_allclose(logits[1], logits[0], atol=1e-3)
    assert_allclose(logits[2], logits[0], atol=1e-3)


def test_a_token_does_not_attend_to_itself(x64):
    _, params = make(model={"compute_dtype": "float64"})
    weights = params["layers"]["attention"]
    hidden = np.random.default_rng(0).standard_normal((1, 5, 22))

    def output(hidden):
        query = jnp.ones((1, 5, 2, 11))
        keys = (weights["key_DHK"][0], weights["value_DHK"][0], params["positions_SK"])
        z = jnp.zeros((1, 1, 2))
        memory = LayerMemory.of(jnp.zeros((1, 37, 22)))
        return reference.attend(query, hidden, memory, *keys, z, ramp=5)[0][0, 3].sum()

    gradient = np.abs(jax.grad(output)(jnp.asarray(hidden)))[0].sum(axis=1)
    assert_array_equal(gradient[3:], 0)
    assert (gradient[:3] > 0).all()


def test_memory_takes_no_gradient_but_its_projections_do():
    config, params = make()
    memory = transformer.init_memory(config, 2)
    memory = memory.advance(apply(config, params, TOKENS[:, :13], memory).inputs_LBTD, config.span.limit)

    def total(params, hidden):
        return apply(config, params, TOKENS[:, 13:26], memory._replace(hidden_LBMD=hidden)).logits_BTV.var()

    _, to_memory = jax.jit(jax.grad(total, argnums=(0, 1)))(params, memory.hidden_LBMD)
    assert_array_equal(to_memory, 0)
    # A segment of one token has all its keys in memory.
    config, params = make(train={"segment": 1})
    memory = transformer.init_memory(config, 2)
    memory = memory.advance(apply(config, params, TOKENS[:, :1], memory).inputs_LBTD, config.span.limit)
    gradients = jax.jit(jax.grad(lambda p: apply(config, p, TOKENS[:, 1:2], memory).logits_BTV.var()))(params)
    assert np.abs(gradients["layers"]["attention"]["key_DHK"]).max() > 0


def test_masked_empty_memory_is_not_attended():
    config, params = make(model={"mask_empty_memory": True})
    found = apply(config, params, TOKENS[:, :13], transformer.init_memory(config, 2))
    assert np.isfinite(found.logits_BTV).all()
    full = transformer.init_memory(config, 2)._replace(filled=jnp.asarray(37, jnp.int32))
    as_published = apply(config, params, TOKENS[:, :13], full)
    assert np.abs(found.logits_BTV - as_published.logits_BTV).max() > 1e-3
    # With nothing to attend to the first token's attention is 0: junk in the empty memory changes nothing.
    junk = transformer.init_memory(config, 2)
    junk = junk._replace(hidden_LBMD=junk.hidden_LBMD + 7)
    with_junk = apply(config, params, TOKENS[:, :13], junk)
    assert_array_equal(with_junk.logits_BTV, found.logits_BTV)


def test_initial_values():
    config = tiny_config(model={"layers": 2, "width": 64, "heads": 4, "feedforward": 256}, span={"limit": 300})
    params = transformer.init(config, 200, jax.random.key(1))
    for name in ("embedding_VD", "positions_SK"):
        assert_allclose(params[name].std(), 1, atol=0.03)
        assert_allclose(params[name].mean(), 0, atol=0.03)
    layers = params["layers"]
    bounds = {f"{name}_DHK": 1 / 8 for name in ("query", "key", "value")} | {"output_HKD": 1 / 8}
    uniform = [(layers["attention"][name], bound) for name, bound in bounds.items()]
    uniform += [(layers["feedforward"][name], 1 / 8) for name in ("expand_DF", "expand_bias_F")]
    uniform += [(layers["feedforward"][name], 1 / 16) for name in ("contract_FD", "contract_bias_D")]
    uniform += [(params["output_DV"], 1 / 8), (params["output_bias_V"], 1 / 8)]
    for values, bound in uniform:
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.95 * bound
        assert_allclose(values.std(), bound / np.sqrt(3), rtol=0.1)
    assert_array_equal(layers["attention"]["span"]["span_fraction_H"], 0)
    for norm in (layers["attention_norm"], layers["feedforward_norm"]):
        assert_array_equal(norm["scale"], 1)
        assert_array_equal(norm["bias"], 0)
    assert np.abs(layers["attention"]["key_DHK"][0] - layers["attention"]["key_DHK"][1]).max() > 0.05


def test_initial_values_of_persistent_vectors():
    sizes = {"layers": 2, "width": 64, "heads": 4}
    key = jax.random.key(1)
    params = transformer.init(tiny_config(model=sizes | {"persistent": 400}), 200, key)
    layers = params["layers"]
    assert {*layers} == {"attention", "attention_norm"}
    persistent = layers["attention"]["persistent"]
    assert persistent["key_HKU"].shape == (2, 4, 16, 400)
    assert persistent["value_HUK"].shape == (2, 4, 400, 16)
    for values, deviation in ((persistent["key_HKU"], 1 / 4), (persistent["value_HUK"], 1 / 20)):
        assert_allclose(values.std(), deviation, rtol=0.02)
        assert_allclose(values.mean(), 0, atol=0.02 * deviation)
        # Normal, not uniform: 4.6 % are beyond two deviations.
        assert_allclose((np.abs(values) > 2 * deviation).mean(), 0.0455, atol=0.005)
        assert np.abs(values[0] - values[1]).max() > deviation
    # All else starts as without them.
    without = transformer.init(tiny_config(model=sizes), 200, key)["layers"]["attention"]
    jax.tree.map(assert_array_equal, {name: layers["attention"][name] for name in without}, without)


@pytest.mark.parametrize("persistent", [0, 7])
def test_bfloat16_keeps_parameters_and_logits_in_float32(persistent):
    config, params = make(model={"compute_dtype": "bfloat16", "persistent": persistent})
    exact_config, _ = make(model={"persistent": persistent})
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    memory = transformer.init_memory(config, 2)
    assert memory.hidden_LBMD.dtype == jnp.bfloat16
    rough = apply(config, params, TOKENS[:, :13], memory)
    exact = apply(exact_config, params, TOKENS[:, :13], transformer.init_memory(exact_config, 2))
    assert rough.logits_BTV.dtype == jnp.float32
    # bfloat16 has 8 bits: 0.4 % each of some thirty roundings on the way.
    assert_allclose(rough.logits_BTV, exact.logits_BTV, atol=0.05)
    assert np.abs(rough.logits_BTV - exact.logits_BTV).max() > 1e-4


def test_bfloat16_does_not_round_the_weights_of_spans():
    config, params = make("dynamic", model={"compute_dtype": "bfloat16"})
    found = apply(config, params, TOKENS[:, :13], transformer.init_memory(config, 2))
    span = params["layers"]["attention"]["span"]
    hidden_BTD = np.asarray(params["embedding_VD"].astype(jnp.bfloat16), np.float64)[TOKENS[:, :13]]
    logit_BTH = hidden_BTD @ np.asarray(span["weight_DH"][0]) + np.asarray(span["bias_H"][0])
    assert_allclose(found.z_LBTH[0], config.span.limit / (1 + np.exp(-logit_BTH)), rtol=1e-5)


def test_dropout_changes_logits_and_is_repeatable():
    config, params = make(model={"dropout": 0.4})
    memory = transformer.init_memory(config, 2)

    def logits(step):
        return apply(config, params, TOKENS[:, :13], memory, Dropout.create(0.4, 1, step)).logits_BTV

    assert_array_equal(logits(3), logits(3))
    assert np.abs(logits(3) - logits(4)).max() > 0.1


SHAPES = st.sampled_from([(1, 1, 1, 0), (40, 9, 60, 0), (1, 1, 1, 3)])  # limit, segment, ramp, persistent vectors


@settings(max_examples=15, deadline=None)
@given(
    shape=SHAPES,
    fraction=st.sampled_from([0.0, 0.31, 1.0]),
    scale=st.sampled_from([1.0, 300.0]),
    seed=st.integers(0, 100),
)
def test_always_finite(shape, fraction, scale, seed):
    limit, segment, ramp, persistent = shape
    config, params = make(
        seed=seed,
        span={"limit": limit, "ramp": ramp},
        train={"segment": segment},
        model={"mask_empty_memory": limit == 1, "layers": 1, "persistent": persistent},
    )
    attention = params["layers"]["attention"]
    attention["span"]["span_fraction_H"] = jnp.full((1, 2), fraction)
    # Queries and keys this large make scores of some ten thousand.
    attention["query_DHK"] *= scale
    attention["key_DHK"] *= scale
    value, gradients = _value_and_gradients(config, params, TOKENS[:, :segment], transformer.init_memory(config, 2))
    assert np.isfinite(value)
    for leaf in jax.tree.leaves(gradients):
        assert np.isfinite(leaf).all()


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(config, params, tokens, memory):
    return jax.value_and_grad(lambda params: transformer.apply(config, params, tokens, memory).logits_BTV.var())(params)


def test_checkpoints_know_the_memory_by_these_names():
    # They are a public format: renaming one makes every older checkpoint unreadable.
    assert Memory._fields == ("hidden_LBMD", "end", "filled")


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gradient_of_the_embedding_is_the_sum_of_its_rows(dtype, x64):
    config, params = make(model={"compute_dtype": dtype})
    rows_BTD, pull_back = jax.vjp(lambda params: transformer.embed(config, params, TOKENS), params)
    assert_array_equal(rows_BTD, params["embedding_VD"][TOKENS].astype(dtype))
    d_rows_BTD = jax.random.normal(jax.random.key(3), rows_BTD.shape).astype(dtype)
    expected_VD = np.zeros(params["embedding_VD"].shape)
    np.add.at(expected_VD, TOKENS, np.asarray(d_rows_BTD, np.float64))
    found_VD = pull_back(d_rows_BTD)[0]["embedding_VD"]
    assert found_VD.dtype == params["embedding_VD"].dtype
    assert_allclose(found_VD, expected_VD, rtol=1e-5 if dtype != "float64" else 1e-12, atol=1e-5)
