"""The mask, its derivative at the ends, and the three kinds of span, against the formulas of the paper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.config import SpanConfig
from adaptive_span_jax.model import span


def test_zero_span_leaves_exactly_the_ramp():
    mask = span.soft_mask(jnp.arange(1.0, 40.0), jnp.zeros(()), 32)
    assert mask[0] == 1
    assert mask[1] == 31 / 32
    assert mask[31] == 1 / 32
    assert_array_equal(mask[32:], 0)


@pytest.mark.parametrize("z", [0.0, 3.25, 100.0])
def test_mask_is_the_papers_formula_one_position_further(z):
    distance = np.arange(1.0, 200.0)
    expected = np.minimum(np.maximum((32 + z - (distance - 1)) / 32, 0), 1)
    assert_allclose(span.soft_mask(jnp.asarray(distance), jnp.asarray(z), 32), expected, rtol=1e-6)


def test_derivative_of_the_mask_is_one_at_both_ends():
    derivative = jax.vmap(jax.grad(lambda z, x: span.soft_mask(x, z, 8)), in_axes=(None, 0))
    # z = 2, R = 8: the ramp starts at x = 3, where m is still 1, and ends at x = 11, where m is 0.
    assert_allclose(derivative(2.0, jnp.arange(1.0, 14.0)) * 8, [0, 0] + [1] * 9 + [0, 0])


def test_reach_is_where_mask_and_derivative_end():
    for z in (0.0, 0.5, 7.0, 12.25):
        furthest = int(span.reach(jnp.asarray(z), 8, 1000))
        derivative = jax.grad(lambda z, x: span.soft_mask(x, z, 8))
        assert float(derivative(z, float(furthest))) > 0
        assert float(span.soft_mask(jnp.asarray(furthest + 1.0), jnp.asarray(z), 8)) == 0
        assert float(derivative(z, furthest + 1.0)) == 0
    assert int(span.reach(jnp.asarray(990.0), 32, 1000)) == 1000
    # Also in NumPy, in its own precision.
    z_LH = np.array([[0.0, 7.0 - 1e-12], [12.25, 990.0]])
    assert_array_equal(span.reach(z_LH, 8, 990), [[9, 15], [21, 990]])


def test_average_and_head_spans():
    z_LH = np.array([[0.0, 0.2], [30.0, 99.0]])
    assert span.average_span(z_LH, 8, 100) == (1 + 8 + 65 + 8) / 2
    assert span.average_span(z_LH, 40, 100) == (1 + 40 + 100) / 2
    assert_array_equal(span.head_spans(z_LH, 8, 1000), [[8, 8.2], [38, 107]])
    assert_array_equal(span.head_spans(z_LH, 8, 100), [[8, 8.2], [38, 100]])


def make(kind: str) -> Any:
    return span.make_span(SpanConfig(kind, limit=50, ramp=8, penalty=0.1), width=6, heads=3)


def test_fixed_span_is_the_limit_and_costs_nothing():
    z_BTH = make("fixed")(jnp.ones((2, 5, 6)))
    assert_array_equal(z_BTH, jnp.full((1, 1, 3), 50.0))
    assert make("fixed").penalty(z_BTH) == 0


def test_adaptive_span_starts_at_zero_and_scales_with_the_limit():
    module = make("adaptive")
    assert_array_equal(module(jnp.ones((2, 5, 6))), jnp.zeros((1, 1, 3)))
    module.span_fraction_H[...] = jnp.array([0.0, 0.5, 1.0])
    z_BTH = module(jnp.ones((2, 5, 6)))
    assert_array_equal(z_BTH[0, 0], [0, 25, 50])
    assert module.penalty(z_BTH) == 25


def test_adaptive_span_starts_where_the_config_says():
    config = SpanConfig("adaptive", limit=50, ramp=8, penalty=0.1, initial=20.0)
    assert_allclose(span.make_span(config, width=6, heads=3)(jnp.ones((2, 5, 6))), np.full((1, 1, 3), 20.0), rtol=1e-6)


def test_dynamic_span_against_the_papers_formula():
    rng = np.random.default_rng(3)
    hidden, weight, bias = rng.standard_normal((2, 5, 6)), rng.standard_normal((6, 3)), rng.standard_normal(3)
    module = make("dynamic")
    assert_allclose(module(jnp.asarray(hidden)), np.full((2, 5, 3), 50 / (1 + np.exp(4))), rtol=1e-5)
    module.weight_DH[...], module.bias_H[...] = jnp.asarray(weight), jnp.asarray(bias)
    z_BTH = module(jnp.asarray(hidden))
    expected = 50 / (1 + np.exp(-(hidden @ weight + bias)))
    assert_allclose(z_BTH, expected, rtol=1e-5)
    assert_allclose(module.penalty(z_BTH), expected.mean(), rtol=1e-5)


def test_projection_clips_spans_and_nothing_else():
    tree = {
        "layers": {"span": {"span_fraction_H": jnp.array([-0.1, 0.3, 1.2])}, "key_DHK": jnp.array([-5.0, 5.0])},
        "theirs": {
            "mean_span_fraction_H": jnp.array([-5.0, 5.0]),
            "span_fraction_H": {"scale": jnp.array([-5.0, 5.0])},
        },
    }
    projected = span.project(tree)
    assert_allclose(projected["layers"]["span"]["span_fraction_H"], [0, 0.3, 1])
    assert_array_equal(projected["layers"]["key_DHK"], [-5, 5])
    for leaf in jax.tree.leaves(projected["theirs"]):
        assert_array_equal(leaf, [-5, 5])


def test_mean_z_leaves_out_what_does_not_count():
    z_LBTH = np.random.default_rng(0).uniform(0, 100, (3, 2, 5, 4)).astype(np.float32)
    counted_BT = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], bool)
    expected = (z_LBTH[:, 0, :3].sum(axis=1) + z_LBTH[:, 1, 0]) / 4
    assert_allclose(span.mean_z(jnp.asarray(z_LBTH), counted_BT), expected, rtol=1e-6)
    assert_array_equal(span.mean_z(jnp.asarray(z_LBTH[:, :1, :1]), counted_BT), z_LBTH[:, 0, 0])
    assert_array_equal(span.mean_z(jnp.asarray(z_LBTH), np.zeros((2, 5), bool)), 0)
