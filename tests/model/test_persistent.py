"""Attention to context and persistent vectors against a float64 oracle of one softmax over both."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.typing import ArrayLike
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.model import transformer
from adaptive_span_jax.model.attention import per_head, persistent, reference
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.memory import LayerMemory
from tests.conftest import random_params, tiny_config
from tests.support.attention import draw, errors, spans

PATHS = {"plain": reference, "per_head": per_head}
DIFFERENTIATED = ("query", "segment", "key", "value", "positions", "persistent_key", "persistent_value")


def draw_with(count: int, length: int, limit: int, heads: int = 3) -> dict:
    """Random inputs of one layer's attention, with persistent vectors."""
    arrays, rng = draw(2, length, limit, heads, log_sum=False), np.random.default_rng(7)
    width = arrays["query"].shape[-1]
    arrays["persistent_key"] = rng.standard_normal((heads, width, count))
    arrays["persistent_value"] = rng.standard_normal((heads, count, width))
    return arrays


def merged(path, arrays, z, ramp, rate, valid_length):
    """The attention of a layer, as the model composes it."""
    dropout = Dropout.create(rate, 1, 2) if rate else None
    in_context = path.attend(
        *(arrays["query"], arrays["segment"], LayerMemory.of(arrays["memory"])),
        *(arrays["key"], arrays["value"], arrays["positions"], z),
        ramp=ramp,
        valid_length=valid_length,
        dropout=dropout.at(0) if dropout else None,
    )
    vectors = arrays["persistent_key"], arrays["persistent_value"]
    in_persistent = persistent.attend(arrays["query"], *vectors, dropout.at(2) if dropout else None)
    return persistent.merge(in_context, in_persistent)


def oracle(arrays, z, ramp, rate, valid_length):
    """One softmax over all positions of the context, seen or not, and all persistent vectors."""
    query, positions, memory = arrays["query"], arrays["positions"], arrays["memory"]
    streams, length, heads, width = query.shape
    limit, count = positions.shape[0], arrays["persistent_key"].shape[-1]
    context = jnp.concatenate([memory, arrays["segment"]], axis=1)
    key, value = (jnp.einsum("bjd,dhk->bjhk", context, arrays[name]) for name in ("key", "value"))
    distance = limit + np.arange(length)[:, None] - np.arange(limit + length)[None, :]
    seen = (distance >= 1) & (distance <= limit)
    if valid_length is not None:
        seen &= distance <= valid_length + np.arange(length)[:, None]
    table = positions[np.clip(distance - 1, 0, limit - 1)]
    score = jnp.einsum("bthk,bjhk->bhtj", query, key) + jnp.einsum("bthk,tjk->bhtj", query, table)
    ratio = (ramp + jnp.moveaxis(z, 2, 1)[..., None] + 1 - distance[None, None]) / ramp
    mask = jnp.where(seen[None, None], jnp.where(ratio < 0, 0, jnp.where(ratio > 1, 1, ratio)), 0)
    constant_key = arrays["persistent_key"] * math.sqrt(width)
    constant_score = jnp.einsum("bthk,hkn->bhtn", query, constant_key)
    weight = jnp.concatenate(
        [mask * jnp.exp(score / math.sqrt(width)), jnp.exp(constant_score / math.sqrt(width))], axis=-1
    )
    weight /= weight.sum(axis=-1, keepdims=True)
    if rate:
        dropout = Dropout.create(rate, 1, 2)
        rows = np.ogrid[:streams, :heads, :length, :1][:3]
        for place, columns, first in ((0, distance[None, None], 0), (2, np.arange(count)[None, None, None], -count)):
            word = dropout.at(place)
            for index in (*rows, columns):
                word = word.at(jnp.asarray(index))
            part = slice(first, None) if first else slice(0, -count)
            weight = weight.at[..., part].multiply(jnp.broadcast_to(word.scale(), weight[..., part].shape))
    average = jnp.einsum("bhtj,bjhk->bthk", weight[..., :-count], value)
    constant_value = arrays["persistent_value"] * math.sqrt(count)
    return average + jnp.einsum("bhtn,hnk->bthk", weight[..., -count:], constant_value)


def output_and_gradients(attend, arrays: dict, z: ArrayLike, *setting) -> dict:
    @jax.jit
    def run(z, *differentiated):
        def call(z, *differentiated):
            return attend(arrays | dict(zip(DIFFERENTIATED, differentiated, strict=True)), z, *setting)

        output, pull = jax.vjp(call, z, *differentiated)
        return output, *pull(arrays["d_output"].astype(output.dtype))

    found = run(z, *(arrays[name] for name in DIFFERENTIATED))
    return dict(zip(("output", "z", *DIFFERENTIATED), found, strict=True))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("length", "limit", "count", "heads", "kind", "per_token", "rate", "valid_length"),
    [
        (70, 90, 7, 3, "any", False, 0.3, None),  # adaptive
        (20, 30, 41, 1, "full", False, 0.0, None),  # fixed, one head, more persistent vectors than positions
        (66, 80, 1, 3, "any", True, 0.3, 0),  # dynamic, one vector, and queries that see nothing else
        pytest.param(130, 200, 5, 3, "one long", False, 0.3, None, marks=pytest.mark.slow),
        pytest.param(16, 40, 5, 3, "zero", True, 0.0, 9, marks=pytest.mark.slow),
    ],
)
def test_one_softmax_over_both(path, length, limit, count, heads, kind, per_token, rate, valid_length):
    arrays = draw_with(count, length, limit, heads)
    z = spans(kind, (2, length, heads) if per_token else (1, 1, heads), limit)
    setting = 8, rate, valid_length
    expected = output_and_gradients(oracle, arrays, z, *setting)
    found = output_and_gradients(lambda *arguments: merged(PATHS[path], *arguments), arrays, z, *setting)
    assert max(errors(found, expected).values()) < 1e-9


@pytest.mark.usefixtures("x64")
@given(
    first=st.floats(-1e4, 1e4) | st.just(reference.lowest(np.float64)),
    second=st.floats(-1e4, 1e4),
    seed=st.integers(0, 9),
)
def test_merging_is_a_weighted_average_and_always_finite(first, second, seed):
    outputs = np.random.default_rng(seed).standard_normal((2, 1, 1, 1, 3))
    log_sums = np.array([first, second])[:, None, None, None]

    def merge(outputs, log_sums):
        return persistent.merge((outputs[0], log_sums[0]), (outputs[1], log_sums[1]))

    found, pull = jax.vjp(merge, outputs, log_sums)
    weight = np.exp(np.array([first, second]) - max(first, second))
    assert_allclose(found, (outputs * weight[:, None, None, None, None]).sum(axis=0) / weight.sum(), rtol=1e-12)
    d_outputs, d_log_sums = pull(np.ones_like(found))
    assert np.isfinite(d_outputs).all()
    share = weight / weight.sum()
    expected = share[0] * share[1] * (outputs[0] - outputs[1]).sum()
    assert_allclose(d_log_sums.ravel(), [expected, -expected], rtol=1e-9, atol=1e-12)


def test_huge_scores_stay_finite():
    arrays = draw_with(7, 9, 12)
    lower = {name: jnp.asarray(array, jnp.float32) for name, array in arrays.items()}
    lower["persistent_key"] *= 1e3
    lower["query"] *= 1e3
    for path in PATHS.values():
        found = output_and_gradients(lambda *a, path=path: merged(path, *a), lower, jnp.zeros((1, 1, 3)), 8, 0.0, None)
        assert all(np.isfinite(array).all() for array in found.values())


# bfloat16 keeps 8 bits of each product's inputs.
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 2e-2)])
def test_lower_precision_stays_near_float64(dtype, tolerance):
    arrays, z = draw_with(7, 64, 90), spans("any", (1, 1, 3), 90)
    with jax.enable_x64(True):
        # With this part of d_output, what the tokens add to the gradient of a z that they share does not cancel.
        arrays["d_output"] -= 2 * np.asarray(oracle(arrays, z, 8, 0.3, None))
        expected = jax.device_get(output_and_gradients(oracle, arrays, z, 8, 0.3, None))
    lower = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    z = jnp.asarray(z, jnp.float32)
    found = output_and_gradients(lambda *arguments: merged(per_head, *arguments), lower, z, 8, 0.3, None)
    assert {array.dtype for name, array in found.items() if name != "z"} == {jnp.dtype(dtype)}
    assert max(errors(found, expected).values()) < tolerance


def test_no_scores_are_kept_for_the_backward_pass():
    query, key, value = jnp.ones((2, 6, 3, 4)), jnp.ones((3, 4, 101)), jnp.ones((3, 101, 4))
    _, pull = jax.vjp(persistent.attend, query, key, value)
    kept = [leaf.shape for leaf in jax.tree.leaves(pull)]
    assert (2, 6, 3, 4) in kept
    assert max(math.prod(shape) for shape in kept) == key.size


def test_dropout_of_persistent_vectors_has_bits_of_its_own():
    """Without them the same numbers of a hash would drop distance x and vector x together."""
    config = tiny_config(model={"persistent": 37, "layers": 1, "attention": "plain"})
    params = random_params(config, 11)
    layer = transformer.make_layer(config, jax.tree.map(lambda leaf: leaf[0], params["layers"]))
    seen = []
    layer.attention.persistent.attend = lambda query, dropout: seen.append(dropout) or (query, query[..., 0])  # pyrefly: ignore
    dropout = Dropout.create(0.3, 1, 2)
    hidden, memory = jnp.ones((1, 5, 22)), LayerMemory.of(jnp.zeros((1, 37, 22)))
    layer(hidden, memory, params["positions_SK"], dropout=dropout)
    assert_array_equal(seen[0].word, dropout.at(2).word)
