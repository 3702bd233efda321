"""The dense product with its written-out gradients, against automatic differentiation of the plain product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_span_jax.model.linear import linear


@pytest.mark.parametrize("outer", [(7,), (2, 5), (2, 3, 5)])
def test_value_and_gradients_are_those_of_the_plain_product(x64, outer):
    random = np.random.default_rng(0)
    rows, weight_DE = jnp.asarray(random.normal(size=(*outer, 11))), jnp.asarray(random.normal(size=(11, 13)))
    d_product = jnp.asarray(random.normal(size=(*outer, 13)))
    found, pull_back = jax.vjp(linear, rows, weight_DE)
    expected, pull_back_plain = jax.vjp(
        lambda rows, weight_DE: jnp.einsum("...D,DE->...E", rows, weight_DE), rows, weight_DE
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for one, other in zip(pull_back(d_product), pull_back_plain(d_product), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_several_axes_are_one(x64):
    random = np.random.default_rng(0)
    rows_BTHK, weight_HKD = jnp.asarray(random.normal(size=(2, 5, 3, 4))), jnp.asarray(random.normal(size=(3, 4, 7)))
    d_product = jnp.asarray(random.normal(size=(2, 5, 7)))
    found, pull_back = jax.vjp(lambda rows, weight: linear(rows, weight, 2), rows_BTHK, weight_HKD)
    expected, pull_back_plain = jax.vjp(lambda r, w: jnp.einsum("BTHK,HKD->BTD", r, w), rows_BTHK, weight_HKD)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for one, other in zip(pull_back(d_product), pull_back_plain(d_product), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_keeps_bfloat16():
    rows, weight_DE = jnp.ones((3, 5), jnp.bfloat16), jnp.ones((5, 2), jnp.bfloat16)
    product, pull_back = jax.vjp(linear, rows, weight_DE)
    assert {array.dtype for array in (product, *pull_back(product))} == {jnp.dtype(jnp.bfloat16)}
