"""The negative log-likelihood and its gradient, against the textbook's."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from adaptive_span_jax.training import objective


def test_nats_and_their_gradient_are_those_of_a_softmax(x64):
    rng = np.random.default_rng(3)
    logits_BTV, targets_BT = 5 * rng.standard_normal((2, 7, 11)), rng.integers(0, 11, (2, 7))
    targets_BT[0, :2] = 0, 10
    softmax_BTV = np.exp(logits_BTV) / np.exp(logits_BTV).sum(axis=-1, keepdims=True)
    one_hot_BTV = np.eye(11)[targets_BT]
    weight_BT = rng.standard_normal((2, 7))
    nats_BT, pull_back = jax.vjp(lambda logits: objective.nats_BT(logits, targets_BT), jnp.asarray(logits_BTV))
    assert_allclose(nats_BT, -np.log((softmax_BTV * one_hot_BTV).sum(axis=-1)), rtol=1e-12)
    expected = weight_BT[..., None] * (softmax_BTV - one_hot_BTV)
    assert_allclose(pull_back(jnp.asarray(weight_BT))[0], expected, rtol=1e-9, atol=1e-12)
